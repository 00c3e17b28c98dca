"""Every drafter, head, token map, draft length, way of sampling, cache situation and batch size
produces plain decoding's tokens, whether rounds overlap or not.

The ways of sampling are mixed within the batches: a request's text must not depend on its
neighbours either."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.lossless.cases import OUTPUT_LEN, Case, assert_same, generate
from tests.lossless.conftest import (
    CORPUS,
    DFLASH,
    DFLASH2,
    DSPARK,
    FILES,
    HEAD,
    HOT,
    LATENT_HEAD,
    OTHER_TOKENIZER,
)
from tests.lossless.drafters import AdversarialDrafter, AdversarialTreeDrafter, expected_rounds
from tests.lossless.engines import DRAFT_MODEL, DYNAMIC_TREE, MODES, PARD, engine, static_choices
from tests.lossless.oracle import GetOracle
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput, SpeculativeStats
from tllm_spec.sampling_params import SamplingParams

DRAFT_LENS = (1, 2, 3, 5, 7)
FITTED_DRAFT_LENS = (3, 2, 4)
NO_REUSE = {"enable_block_reuse": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "undisturbed": {"kv_cache_config": NO_REUSE},
    "chunked_prefill": {"kv_cache_config": NO_REUSE, "enable_chunked_prefill": True},
    "prefix_reuse": {"kv_cache_config": {"tokens_per_block": 16}},
    "prefix_reuse_and_chunks": {
        "kv_cache_config": {"tokens_per_block": 32},
        "enable_chunked_prefill": True,
        "max_num_tokens": 16,
    },
    "preemption_of_3": {"kv_cache_config": {"tokens_per_block": 16, "max_tokens": 288}},
    "preemption_of_8": {"kv_cache_config": {"tokens_per_block": 16, "max_tokens": 640}},
}
# A request that is alone always fits, so it is never preempted.
BATCH_SIZES = {
    "undisturbed": (8, 3, 1),
    "chunked_prefill": (3, 8),
    "prefix_reuse": (8, 3),
    "prefix_reuse_and_chunks": (1, 2),
    "preemption_of_3": (3,),
    "preemption_of_8": (8,),
}
EAGLE = {"decoding_type": "Eagle", "speculative_model": HEAD}
DRAFT_TARGET = {"decoding_type": "Draft_Target", "speculative_model": DRAFT_MODEL}
DFLASH_HEAD = {"decoding_type": "DFlash", "speculative_model": DFLASH}
DSPARK_HEAD = {"decoding_type": "DSpark", "speculative_model": DSPARK}
LATENT = {"decoding_type": "Eagle3", "speculative_model": LATENT_HEAD}
TWO_MODEL = {"eagle3_one_model": False}
ONE_MODEL = {"draft_target_one_model": True}
MAP: dict[str, Any] = {"speculative_token_map": HOT}
OTHER = DRAFT_TARGET | {"speculative_model": OTHER_TOKENIZER}
SINK = {"draft_window_size": 12, "draft_sink_size": 4}
# With a file of `fitted_file`, or options that few modes have.
FITTED: dict[str, dict[str, Any]] = {
    "eagle": EAGLE,
    "eagle_two_model": EAGLE | TWO_MODEL,
    "eagle_tree": EAGLE | DYNAMIC_TREE,
    "eagle_two_model_tree": EAGLE | TWO_MODEL | DYNAMIC_TREE,
    "eagle_static": EAGLE,
    "eagle_map": EAGLE | MAP,
    "eagle_map_tree": EAGLE | MAP | DYNAMIC_TREE,
    "draft_target_map": DRAFT_TARGET | MAP,
    "draft_target_map_tree": DRAFT_TARGET | MAP | DYNAMIC_TREE,
    "draft_target_one_model_map": DRAFT_TARGET | MAP | ONE_MODEL,
    "eagle_sa": EAGLE | {"sa_config": {}},
    "draft_target_other": OTHER,
    "draft_target_other_tree": OTHER | DYNAMIC_TREE,
    "draft_target_one_model_other": OTHER | ONE_MODEL,
    "draft_target_one_model_other_map": OTHER | MAP | ONE_MODEL,
    "pard_other": PARD | {"speculative_model": OTHER_TOKENIZER},
    "ngram_corpus": (MODES["ngram"] or {}) | {"external_corpus_path": CORPUS},
    "dflash": DFLASH_HEAD,
    "dflash_tree": DFLASH_HEAD | DYNAMIC_TREE,
    "dflash2": DFLASH_HEAD | {"speculative_model": DFLASH2},
    "dspark": DSPARK_HEAD,
    "dspark_tree": DSPARK_HEAD | DYNAMIC_TREE,
    "dspark_sa": DSPARK_HEAD | {"sa_config": {}},
    "eagle3_sink": (MODES["eagle3"] or {}) | SINK,
    "draft_target_sink_tree": DRAFT_TARGET | DYNAMIC_TREE | SINK,
    "eagle3_latent": LATENT,
    "eagle3_latent_two_model": LATENT | TWO_MODEL,
    "eagle3_latent_tree": LATENT | DYNAMIC_TREE,
}
# Acceptance lengths that every draft length of a mode reaches: there were drafts, and some were
# right.
FLOORS = {
    "plain": 0.0,
    "ngram": 1.02,
    "draft_target": 1.3,
    "draft_target_onnxruntime": 1.3,
    "user_provided": 1.3,
    "ngram_tree": 1.02,
    "user_provided_tree": 1.3,
    "draft_target_one_model": 1.3,
    "eagle3": 1.3,
    "eagle3_two_model": 1.3,
    "eagle3_tree": 1.5,
    "eagle3_static": 1.5,
    "eagle3_two_model_tree": 1.5,
    "draft_target_one_model_tree": 1.5,
    "draft_target_tree": 1.5,
    "eagle": 1.3,
    "eagle_two_model": 1.3,
    "eagle_tree": 1.4,
    "eagle_two_model_tree": 1.4,
    "eagle_static": 1.4,
    "eagle_map": 1.2,
    "eagle_map_tree": 1.3,
    "draft_target_map": 1.2,
    "draft_target_map_tree": 1.3,
    "draft_target_one_model_map": 1.2,
    "eagle3_onnxruntime": 1.3,
    "sa": 1.02,
    "eagle3_sa": 1.3,
    "eagle3_two_model_sa": 1.3,
    "draft_target_one_model_sa": 1.3,
    "eagle_sa": 1.3,
    "peagle": 1.3,
    "peagle_two_model": 1.3,
    "peagle_tree": 1.4,
    "pard": 1.2,
    "pard_two_model": 1.2,
    "dflash": 1.0,  # its weights are random
    "dflash_tree": 1.0,
    "dflash2": 1.0,
    "dspark": 1.0,
    "dspark_tree": 1.0,
    "dspark_sa": 1.02,
    "draft_target_other": 1.3,
    "draft_target_other_tree": 1.5,
    "draft_target_one_model_other": 1.3,
    "draft_target_one_model_other_map": 1.2,
    "pard_other": 1.1,
    "eagle3_sink": 1.3,
    "draft_target_sink_tree": 1.4,
    "ngram_corpus": 2.0,
    "eagle3_sa_tree": 1.5,
    "eagle3_sa_static": 1.5,
    "eagle3_two_model_sa_tree": 1.5,
    "eagle3_latent": 1.2,
    "eagle3_latent_two_model": 1.2,
    "eagle3_latent_tree": 1.3,
    "draft_target_sa": 1.3,
    "draft_target_sa_tree": 1.5,
    "pard_two_model_sa": 1.2,
}


@dataclass(frozen=True)
class Run:
    """One engine and how it is used."""

    mode: str
    setting: str
    draft_len: int
    batch_size: int
    overlap: bool

    def __str__(self) -> str:
        rounds = "overlap" if self.overlap else "in_turn"
        return f"{self.mode}-{self.setting}-K{self.draft_len}-{self.batch_size}-{rounds}"


# Each other one is made of two of these, or has texts of its own in tests/executor or another test
# of this folder.
QUICK = (
    "plain",
    "draft_target",
    "draft_target_one_model",
    "ngram_tree",
    "eagle3",
    "eagle3_two_model",
    "eagle3_tree",
)


def covering_runs() -> list[Any]:
    """Every mode in every setting, and every mode with every draft length; batch sizes and overlap
    change from one to the next. Of each QUICK mode one setting is not slow: every setting and
    draft length is among these, with and without overlap."""
    runs = []
    for (i, mode), (j, setting) in product(enumerate(FLOORS), enumerate(SETTINGS)):
        sizes = BATCH_SIZES[setting]
        lens = FITTED_DRAFT_LENS if mode in FITTED else DRAFT_LENS
        draft_len = 0 if mode == "plain" else lens[(2 * i + j - 1) % len(lens)]
        batch_size, overlap = sizes[i // 6 % len(sizes)], (i // 6 + j) % 3 != 1
        run = Run(mode, setting, draft_len, batch_size, overlap)
        is_slow = (i + j) % len(SETTINGS) or mode not in QUICK
        marks = [pytest.mark.slow] if is_slow else []
        runs.append(pytest.param(run, id=str(run), marks=marks))
    return runs


def make_llm(
    run: Run, texts: dict[tuple[int, ...], list[int]], file_of: Callable[[str], Path]
) -> LLM:
    options = SETTINGS[run.setting] | {"max_batch_size": 8}
    options["disable_overlap_scheduler"] = not run.overlap
    if run.mode in MODES:
        options |= engine(run.mode, run.draft_len, overlap=run.overlap)
    elif run.mode in FITTED:
        options["speculative_config"] = fitted(run, file_of)
    else:
        kind = AdversarialTreeDrafter if run.mode.endswith("_tree") else AdversarialDrafter
        options["speculative_config"] = {
            "decoding_type": "User_Provided",
            "drafter": kind(texts),
            "max_draft_len": run.draft_len,
            "max_total_draft_tokens": window_of(run) - 1,
        }
    if run.setting == "prefix_reuse_and_chunks":
        num_windows = 1 if run.mode in MODES else 3  # a user's tree is as wide at any depth
        options["max_num_tokens"] = max(16, num_windows * window_of(run))
    if run.setting == "chunked_prefill":
        # Room for all windows and a few prompt tokens: prompts come in many chunks next to
        # generating requests.
        options["max_num_tokens"] = run.batch_size * window_of(run) + 10
    if run.setting.startswith("preemption"):
        options["scheduler_config"] = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    return LLM("zoo:llama", **options)


def fitted(run: Run, file_of: Callable[[str], Path]) -> dict[str, Any]:
    config = {
        option: str(file_of(value)) if value in FILES else value
        for option, value in FITTED[run.mode].items()
    }
    if run.mode.endswith("_static"):
        config["eagle_choices"] = static_choices(run.draft_len)
    return config | {"max_draft_len": run.draft_len}


def window_of(run: Run) -> int:
    """Rows of a request."""
    if run.mode.endswith("_static"):
        return 1 + len(static_choices(run.draft_len))
    if run.mode == "user_provided_tree":
        return 1 + 2 * run.draft_len
    return 1 + run.draft_len * (4 if run.mode.endswith("_tree") else 1)


def leave_prefixes(llm: LLM, cases: list[Case]) -> None:
    """Fills the cache with the prompts, all but their last twenty tokens: some whole pages and a
    part of one."""
    one = SamplingParams(max_tokens=1)
    llm.generate([[*case.prompt[:-20], 2] for case in cases], one, use_tqdm=False)


@pytest.mark.parametrize("run", covering_runs())
def test_the_text_is_plain_decodings(
    run: Run,
    cases: list[Case],
    plain: list[RequestOutput],
    known_texts: dict[tuple[int, ...], list[int]],
    fitted_file: Callable[[str], Path],
    oracle: GetOracle,
) -> None:
    with make_llm(run, known_texts, fitted_file) as llm:
        assert llm._executor.parts.max_in_flight == run.overlap
        if run.setting.startswith("prefix_reuse"):
            leave_prefixes(llm, cases)
        preemptions = llm._executor.scheduler.num_preemptions
        outputs = generate(llm, cases, run.batch_size)
        llm.check_integrity()
        preempted = llm._executor.scheduler.num_preemptions > preemptions
    for case, output, expected in zip(cases, outputs, plain, strict=True):
        assert_same(case, output, expected, oracle)
    assert all(output.outputs[0].length == OUTPUT_LEN for output in outputs[:8])
    assert preempted == run.setting.startswith("preemption")
    found = [output.cached_tokens for output in outputs]
    assert all(found) == any(found) == run.setting.startswith("prefix_reuse")
    assert_speculated(run, outputs, plain, undisturbed=not preempted)


def assert_speculated(
    run: Run, outputs: list[RequestOutput], plain: list[RequestOutput], *, undisturbed: bool
) -> None:
    """There were drafts, and they were accepted as often as they were right."""
    total = sum(
        (output.speculative_decoding or SpeculativeStats() for output in outputs),
        SpeculativeStats(),
    )
    assert total.acceptance_length >= FLOORS[run.mode]
    if run.mode.startswith("user_provided") and undisturbed:
        for output, expected in zip(outputs[:8], plain, strict=False):
            if output.outputs[0].token_ids == expected.outputs[0].token_ids:
                stats = output.speculative_decoding
                assert stats is not None
                counted = (stats.rounds, stats.num_drafted_tokens, stats.num_accepted_tokens)
                assert counted == expected_rounds(OUTPUT_LEN, run.draft_len)
