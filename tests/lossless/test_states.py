"""Recurrent states of 16 bits, which round after each token: no drafter, chunk, prefix hit or
preemption changes a text."""

from typing import Any

import pytest
import torch

from tests.lossless.small_models import PROMPTS, by_default, texts
from tests.lossless.test_families import FAMILIES, STATES, Models
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp)


def over_states(setting: str, dtype: str) -> dict[str, Any]:
    """The options of a setting, with recurrent states of this type."""
    cache = STATES[setting]["kv_cache_config"] | {"mamba_ssm_cache_dtype": dtype}
    return STATES[setting] | {"kv_cache_config": cache}


OVER_STATES = [
    ("qwen3-next, mtp", "mtp, chain, one-model"),
    ("qwen3-next, mtp", "mtp, dynamic, two-model"),
    *(("qwen3-next", name) for name in ("known tree", "ngram", "sa", "head, chain, one-model")),
]
OVER_STATES_QUICK = [(OVER_STATES[0], "preemption", "bfloat16")]


@pytest.mark.parametrize(
    ("drafted", "setting", "dtype"),
    by_default(
        OVER_STATES_QUICK,
        OVER_STATES,
        ("preemption", "chunks", "prefix_reuse"),
        ("bfloat16", "float16"),
    ),
)
def test_over_states_of_16_bits_drafts_leave_the_text_alone(
    drafted: tuple[str, str], setting: str, dtype: str, models: Models
) -> None:
    """A block of a prompt, after which its state is rounded, depends on the options of reuse."""
    family, drafter = drafted
    undisturbed = "prefix_reuse" if setting == "preemption" else setting
    options = over_states(undisturbed, dtype) | {"max_batch_size": 1}
    alone, _ = texts(models.folder(family), **options)
    found, length = models.texts(family, drafter, **over_states(setting, dtype))
    assert found == alone
    assert length >= FAMILIES[family].drafters[drafter][1]


def test_states_of_16_bits_are_rounded(models: Models) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0)
    found = {}
    for dtype in ("auto", "float32", "bfloat16", "float16"):
        options: dict[str, Any] = over_states("undisturbed", dtype)
        with LLM(str(models.folder("qwen3-next")), skip_tokenizer_init=True, **options) as llm:
            found[dtype] = torch.tensor(
                [
                    step.logprob
                    for each in llm.generate(PROMPTS[3], params).outputs[0].logprobs
                    for step in each.values()
                ]
            )
    errors = {dtype: (own - found["auto"]).abs().max() for dtype, own in found.items()}
    assert errors["float32"] == 0 < errors["float16"] < errors["bfloat16"] < 0.5


def test_a_type_of_states_is_refused_where_there_are_none(models: Models) -> None:
    cache = {"mamba_ssm_cache_dtype": "bfloat16"}
    with pytest.raises(ValueError, match=r"models with recurrent states, and .* which has none"):
        LLM(str(models.folder("Llama")), skip_tokenizer_init=True, kv_cache_config=cache)
