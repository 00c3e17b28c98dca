"""DeepSeek's MTP modules as files of their own, and what a GPU makes of latents. That drafts leave
its texts alone is in `test_families`."""

from pathlib import Path
from typing import Any

import pytest

from tests.lossless.small_models import (
    ON_GPU,
    PLAIN,
    PROMPTS,
    SETTINGS,
    TREES,
    by_default,
    plain_texts,
    texts,
    write_head,
)
from tests.models.deepseek import save_deepseek
from tests.models.helpers import save_checkpoint
from tests.models.mtp_reference import export_modules, save_predictable
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp")
    save_predictable(path, num_modules=2)
    return path


@pytest.fixture(scope="module")
def plain_of_mtp(with_mtp: Path) -> list[list[int]]:
    return texts(with_mtp, max_batch_size=1, **PLAIN)[0]


@pytest.mark.parametrize(
    ("is_vanilla", "one_model"), by_default([(True, False)], (True, False), (True, False))
)
def test_exported_modules_draft_as_those_of_the_checkpoint(
    is_vanilla: bool, one_model: bool, plain_of_mtp: list[list[int]], tmp_path: Path
) -> None:
    folder, exported = tmp_path / "target", tmp_path / "exported"
    folder.mkdir()
    save_predictable(folder, num_modules=2)
    mtp = {
        "decoding_type": "MTP",
        "max_draft_len": 2,
        "mtp_eagle_one_model": one_model,
        "use_mtp_vanilla": is_vanilla,
    }
    expected = texts(folder, speculative_config=mtp, **SETTINGS["undisturbed"])
    export_modules(folder, exported)
    mtp["speculative_model"] = str(exported)
    found = texts(folder, speculative_config=mtp, **SETTINGS["undisturbed"])
    assert found == expected and found[0] == plain_of_mtp


def test_mtp_and_exported_modules_need_each_other(with_mtp: Path, tmp_path: Path) -> None:
    folder, exported = tmp_path / "target", tmp_path / "exported"
    folder.mkdir()
    save_predictable(folder)
    export_modules(folder, exported)
    for decoding, draft, problem in (
        ("Eagle3", exported, "has MTP modules; use it with decoding_type: MTP"),
        ("MTP", with_mtp, "must be a folder of exported MTP modules"),
        ("MTP", None, "num_nextn_predict_layers of this DeepseekV3ForCausalLM is 0"),
    ):
        spec = {"decoding_type": decoding, "max_draft_len": 2}
        spec |= {} if draft is None else {"speculative_model": str(draft)}
        with pytest.raises(ValueError, match=problem):
            LLM(str(folder), skip_tokenizer_init=True, speculative_config=spec)


DRAFTS = {"chain": {"max_draft_len": 2}} | TREES


@pytest.mark.gpu
@pytest.mark.parametrize("setting", ["undisturbed", "prefix_reuse", "chunks"])
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("one_model", [True, False])
@pytest.mark.parametrize("family", ["DeepseekV3", "Llama"])
def test_an_eagle3_head_with_latents_leaves_the_text_alone_on_a_gpu(
    family: str, one_model: bool, drafts: str, setting: str, tmp_path: Path
) -> None:
    target, head = tmp_path / "target", write_head(tmp_path / "head", latent=True)
    save_deepseek(target, family) if family == "DeepseekV3" else save_checkpoint(target, family)
    eagle3 = {
        "decoding_type": "Eagle3",
        "speculative_model": str(head),
        "eagle3_layers_to_capture": [0, 1],
        "eagle3_one_model": one_model,
        **DRAFTS[drafts],
    }
    found, _ = texts(target, speculative_config=eagle3, **(SETTINGS[setting] | ON_GPU))
    assert found == plain_texts(target)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_gives_every_bit_of_a_request_alone(dtype: str, with_mtp: Path) -> None:
    mtp = {"decoding_type": "MTP", "max_draft_len": 2}
    runs: dict[str, dict[str, Any]] = {
        "alone": PLAIN | {"max_batch_size": 1, "cuda_graph_config": None},
        "together": {},
        "without graphs": {"cuda_graph_config": None},
        "in chunks": SETTINGS["chunks"],
        "with prefix hits": SETTINGS["prefix_reuse"],
        "preempted": SETTINGS["preemption"],
        "chains": {"speculative_config": mtp},
        "chains, two-model": {"speculative_config": mtp | {"mtp_eagle_one_model": False}},
        "trees": {"speculative_config": {"decoding_type": "MTP"} | TREES["dynamic"]},
        "trees in chunks": {"speculative_config": {"decoding_type": "MTP"} | TREES["static"]}
        | SETTINGS["chunks"],
    }
    params = [
        SamplingParams(
            max_tokens=40, ignore_eos=True, seed=i, temperature=0.4 * (i % 2), logprobs=2
        )
        for i in range(len(PROMPTS))
    ]
    expected: list[Any] = []
    for name, options in runs.items():
        sizes = {"max_batch_size": 3, "max_seq_len": 64, "cuda_graph_config": {"batch_sizes": [3]}}
        with LLM(
            str(with_mtp),
            device="cuda",
            dtype=dtype,
            skip_tokenizer_init=True,
            deterministic=True,
            **(sizes | options),
        ) as llm:
            outputs = llm.generate(PROMPTS, params) + llm.generate(PROMPTS, params)
            llm.check_integrity()
        found = [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]
        expected = expected or found
        for own, other in zip(found, expected, strict=True):
            assert own == other, name
        if "speculative_config" in options:
            stats = [each.speculative_decoding for each in outputs]
            assert max(each.acceptance_length for each in stats if each) > 1.3, name
