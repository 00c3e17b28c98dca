"""Small random models through the engine: requests of several pages, what disturbs them, and the
drafts that change no text."""

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.models.helpers import random_tokens
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams

# With a public pool the second time finds the text of the first.
NGRAM = {"decoding_type": "NGram", "max_draft_len": 3, "is_public_pool": True}
TextsOf = Callable[[str], list[list[int]]]  # of a model or format, by its name
# The first two share 12 tokens.
SHARED = random_tokens(12, seed=9)
PROMPTS = [
    SHARED + random_tokens(7, seed=1),
    SHARED + random_tokens(5, seed=2),
    random_tokens(5, seed=3) * 4,
    random_tokens(18, seed=4),
]
PLAIN = {"kv_cache_config": {"enable_block_reuse": False}, "disable_overlap_scheduler": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "undisturbed": {"kv_cache_config": {"enable_block_reuse": False}},
    "prefix_reuse": {"kv_cache_config": {"tokens_per_block": 4}},
    "chunks": {
        "kv_cache_config": {"tokens_per_block": 4},
        "enable_chunked_prefill": True,
        "max_num_tokens": 12,
    },
    "preemption": {
        "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 84},
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
    },
}
# Prefixes go to host memory and come back.
IN_HOST = SETTINGS["preemption"]["kv_cache_config"] | {"host_cache_size": 1 << 20}
HOST: dict[str, dict[str, Any]] = {"host": {"kv_cache_config": IN_HOST}}
TREES: dict[str, dict[str, Any]] = {
    "dynamic": {
        "max_draft_len": 3,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 3,
        "max_total_draft_tokens": 8,
    },
    "static": {"eagle_choices": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
}
ON_GPU: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "cuda_graph_config": {"batch_sizes": [1, 3]},
}


def over_codes(options: dict[str, Any]) -> dict[str, Any]:
    """The options with an FP8 KV cache."""
    return options | {"kv_cache_config": options["kv_cache_config"] | {"dtype": "fp8"}}


def texts(folder: Path, **options: Any) -> tuple[list[list[int]], float]:
    """Each prompt's tokens, greedy and sampled, twice, so that the second finds its prefix cached;
    and the most accepted drafts per round. What has neither a cache nor drafts is asked once."""
    params = [
        SamplingParams(max_tokens=18, ignore_eos=True, seed=i, temperature=0.3 * (i % 2))
        for i in range(len(PROMPTS))
    ]
    sizes = {"skip_tokenizer_init": True, "max_batch_size": 3, "max_seq_len": 64}
    sizes["language_model_only"] = True
    has_cache = options.get("kv_cache_config", {}).get("enable_block_reuse", True)
    with LLM(str(folder), **(sizes | options)) as llm:
        found = llm.generate(PROMPTS, params)
        is_repeated = has_cache or "speculative_config" in options
        found += llm.generate(PROMPTS, params) if is_repeated else found
        llm.check_integrity()
        assert bool(llm._executor.scheduler.num_preemptions) == ("scheduler_config" in options)
    lengths = [
        each.speculative_decoding.acceptance_length for each in found if each.speculative_decoding
    ]
    return [each.outputs[0].token_ids for each in found], max(lengths, default=1.0)


def plain_texts(folder: Path, **options: Any) -> list[list[int]]:
    found, _ = texts(folder, max_batch_size=1, **PLAIN, **options)
    assert len({tuple(tokens) for tokens in found}) == len(PROMPTS)
    return found


def assert_deterministic_texts_do_not_depend_on_drafts(folder: Path) -> None:
    """On a GPU."""
    options = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
    alone, _ = texts(folder, max_batch_size=1, **(SETTINGS["undisturbed"] | options))
    for own in (None, NGRAM):
        for setting in ("undisturbed", "chunks"):
            found, _ = texts(folder, speculative_config=own, **(SETTINGS[setting] | options))
            assert found == alone


def write_head(folder: Path, *, latent: bool = False) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 64, "vocab_size": 128, "draft_vocab_size": 100}
    return write_tiny_eagle3(folder, num_captured=2, latent=latent, **sizes)


def by_default(quick: Iterable[tuple[Any, ...]], *values: Iterable[Any]) -> list[Any]:
    """All combinations of the values; those that are not in `quick` are slow."""
    quick, every = list(quick), list(product(*values))
    assert set(quick) <= set(every)
    return [
        pytest.param(*each, marks=[] if each in quick else [pytest.mark.slow]) for each in every
    ]
