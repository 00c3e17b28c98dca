"""EAGLE-1/2 heads and token maps produce plain decoding's tokens: chains and trees on both paths,
in every cache situation, whether rounds overlap or not."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lossless.cases import Case, assert_same, generate
from tests.lossless.engines import DRAFT_MODEL, DYNAMIC_TREE, static_choices
from tests.lossless.fitted_eagle import write_fitted_eagle
from tests.lossless.oracle import Oracle
from tests.lossless.test_equality import BATCH_SIZES, SETTINGS, leave_prefixes
from tests.models.helpers import load
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput, SpeculativeStats
from tllm_spec.zoo.registry import resolve_model

DRAFT_LENS = (3, 2, 4)
EAGLE = {"decoding_type": "Eagle"}
DRAFT_TARGET = {"decoding_type": "Draft_Target", "speculative_model": DRAFT_MODEL}
TWO_MODEL = {"eagle3_one_model": False}
MAP: dict[str, Any] = {"speculative_token_map": ""}  # the fixture's
# With the acceptance length that every draft length reaches.
MODES: dict[str, tuple[dict[str, Any], float]] = {
    "eagle": (EAGLE, 1.3),
    "eagle_two_model": (EAGLE | TWO_MODEL, 1.3),
    "eagle_tree": (EAGLE | DYNAMIC_TREE, 1.4),
    "eagle_two_model_tree": (EAGLE | TWO_MODEL | DYNAMIC_TREE, 1.4),
    "eagle_static": (EAGLE, 1.4),
    "eagle_map": (EAGLE | MAP, 1.2),
    "eagle_map_tree": (EAGLE | MAP | DYNAMIC_TREE, 1.3),
    "draft_target_map": (DRAFT_TARGET | MAP, 1.2),
    "draft_target_map_tree": (DRAFT_TARGET | MAP | DYNAMIC_TREE, 1.3),
    "draft_target_one_model_map": (DRAFT_TARGET | MAP | {"draft_target_one_model": True}, 1.2),
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


def covering_runs() -> list[Any]:
    """Every mode in every setting. Every mode in one setting is not slow."""
    runs = []
    for (i, mode), (j, setting) in product(enumerate(MODES), enumerate(SETTINGS)):
        sizes = BATCH_SIZES[setting]
        overlap, draft_len = i % 3 != 1, DRAFT_LENS[(i + j // 3) % len(DRAFT_LENS)]
        run = Run(mode, setting, draft_len, sizes[i % len(sizes)], overlap)
        marks = [pytest.mark.slow] if (i + j) % len(SETTINGS) else []
        runs.append(pytest.param(run, id=str(run), marks=marks))
    return runs


@pytest.fixture(scope="module")
def texts(cases: list[Case], plain: list[RequestOutput]) -> list[list[int]]:
    """Prompts and outputs of all cases."""
    return [
        case.prompt + output.outputs[0].token_ids for case, output in zip(cases, plain, strict=True)
    ]


@pytest.fixture(scope="module")
def files(texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A head, and a token map of half of the tokens that the texts have."""
    root = tmp_path_factory.mktemp("eagle")
    target = load(resolve_model("zoo:llama"), max_positions=512)
    head = write_fitted_eagle(root / "head", target, texts)
    counts = Counter(token for text in texts for token in text)
    hot = [token for token, _ in counts.most_common(len(counts) // 2)]
    torch.save(torch.tensor(hot), root / "hot.pt")
    return head, root / "hot.pt"


def make_llm(run: Run, files: tuple[Path, Path]) -> LLM:
    head, token_map = files
    config = {"speculative_model": str(head)} | MODES[run.mode][0]
    if "speculative_token_map" in config:
        config["speculative_token_map"] = str(token_map)
    config["max_draft_len"], window = run.draft_len, 1 + run.draft_len
    if run.mode.endswith("_static"):
        config["eagle_choices"] = static_choices(run.draft_len)
    if run.mode.endswith(("_tree", "_static")):
        window = 1 + 4 * run.draft_len
    options = SETTINGS[run.setting] | {"max_batch_size": 8, "speculative_config": config}
    if run.setting == "chunked_prefill":
        options["max_num_tokens"] = run.batch_size * window + 10
    if run.setting == "prefix_reuse_and_chunks":
        options["max_num_tokens"] = 16 + window
    if run.setting.startswith("preemption"):
        options["scheduler_config"] = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    return LLM("zoo:llama", **options, disable_overlap_scheduler=not run.overlap)


def stats_of(outputs: list[RequestOutput]) -> SpeculativeStats:
    return sum(
        (output.speculative_decoding or SpeculativeStats() for output in outputs),
        SpeculativeStats(),
    )


@pytest.mark.thinned
@pytest.mark.parametrize("run", covering_runs())
def test_the_text_is_plain_decodings(
    run: Run,
    files: tuple[Path, Path],
    cases: list[Case],
    plain: list[RequestOutput],
    oracle: Callable[[], Oracle],
) -> None:
    with make_llm(run, files) as llm:
        assert llm._executor.parts.max_in_flight == run.overlap
        if run.setting.startswith("prefix_reuse"):
            leave_prefixes(llm, cases)
        outputs = generate(llm, cases, run.batch_size)
        llm.check_integrity()
        preempted = llm._executor.scheduler.num_preemptions > 0
    for case, output, expected in zip(cases, outputs, plain, strict=True):
        assert_same(case, output, expected, oracle)
    assert preempted == run.setting.startswith("preemption")
    stats = stats_of(outputs)
    print(f"{run}: {stats.acceptance_length:.3f}")
    assert stats.acceptance_length >= MODES[run.mode][1]


@pytest.mark.parametrize(
    "setting", [pytest.param("chunked_prefill", marks=pytest.mark.slow), "prefix_reuse"]
)
def test_chunks_prefix_hits_and_the_path_change_no_draft(
    files: tuple[Path, Path], cases: list[Case], setting: str
) -> None:
    found = []
    for mode, own in (("eagle", "undisturbed"), ("eagle", setting), ("eagle_two_model", setting)):
        with make_llm(Run(mode, own, 3, 8, True), files) as llm:
            if own == "prefix_reuse":
                leave_prefixes(llm, cases)
            found.append(stats_of(generate(llm, cases, 8)))
    assert found[0] == found[1] == found[2]
