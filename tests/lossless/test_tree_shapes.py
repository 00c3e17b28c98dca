"""Draft trees of every width, depth and size give plain decoding's tokens.

Of each width and depth there is a tree with no more drafts than its depth needs, or one of the
default size, or the largest. Drafters, pages, overlap and what disturbs the requests change from
one tree to the next."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from tests.executor.hooks import before_launch
from tests.lossless.cases import Case, assert_same, generate
from tests.lossless.engines import TREES, engine
from tests.lossless.oracle import Oracle
from tllm_spec.config.draft_tree_config import MAX_NODES
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput, SpeculativeStats

WIDTHS, DEPTHS = (2, 4, 8), (1, 2, 3, 4, 5, 6)
SETTINGS = ("reuse", "chunks", "preemption")
BATCH_SIZE = 4


@dataclass(frozen=True)
class Run:
    """One engine, and what its requests meet."""

    mode: str
    topk: int
    depth: int
    num_nodes: int
    page_size: int
    setting: str
    overlap: bool

    def __str__(self) -> str:
        rounds = "overlap" if self.overlap else "in_turn"
        tree = f"{self.depth}x{self.topk}-{self.num_nodes}"
        return f"{self.mode}-{tree}-pages_of_{self.page_size}-{self.setting}-{rounds}"


def runs() -> list[Any]:
    found = []
    for number, (topk, depth) in enumerate(product(WIDTHS, DEPTHS)):
        most = min(MAX_NODES, topk + (depth - 1) * topk**2)
        num_nodes = (depth, min(most, topk * depth), most)[(number + number // 6) % 3]
        run = Run(
            f"{TREES[number % len(TREES)]}_tree",
            topk,
            depth,
            num_nodes,
            page_size=(16, 32)[number // 3 % 2],
            setting=SETTINGS[number // 2 % 3],
            overlap=number // 2 % 2 == 0,
        )
        found.append(pytest.param(run, id=str(run)))
    return found


def options_of(run: Run) -> dict[str, Any]:
    window = 1 + run.num_nodes
    # A window may have KV entries of all its drafts after those of the tokens.
    pages = {"tokens_per_block": run.page_size, "max_tokens": 384 + window}
    options: dict[str, Any] = {
        "reuse": {"kv_cache_config": {"tokens_per_block": run.page_size}},
        "chunks": {
            "kv_cache_config": {"tokens_per_block": run.page_size, "enable_block_reuse": False},
            "enable_chunked_prefill": True,
            # With fewer rows than four prompts have together, even for the largest windows.
            "max_num_tokens": min(BATCH_SIZE * window + 10, 200),
        },
        "preemption": {
            "kv_cache_config": pages,
            "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        },
    }[run.setting]
    speculation = {"dynamic_tree_max_topK": run.topk, "max_total_draft_tokens": run.num_nodes}
    return options | engine(run.mode, run.depth, overlap=run.overlap, **speculation)


def watch_chunks(llm: LLM) -> list[int]:
    """Rows of every prompt chunk that does not end its prompt."""
    rows = list[int]()

    def look(batch: ScheduledBatch) -> None:
        chunks = (each for each in batch.context_requests if not each.is_last_context_chunk)
        rows.extend(request.context_chunk for request in chunks)

    before_launch(llm._executor, look)
    return rows


@pytest.mark.slow  # some trees are in test_equality, and shapes in tests/executor
@pytest.mark.parametrize("run", runs())
def test_a_tree_of_any_shape_gives_plain_decodings_text(
    run: Run, cases: list[Case], plain: list[RequestOutput], oracle: Callable[[], Oracle]
) -> None:
    with LLM("zoo:llama", max_batch_size=BATCH_SIZE, **options_of(run)) as llm:
        if run.setting == "reuse":
            llm.generate([case.prompt[:-20] for case in cases], use_tqdm=False)
        before, chunks = llm._executor.scheduler.num_preemptions, watch_chunks(llm)
        outputs = generate(llm, cases, BATCH_SIZE)
        preempted = llm._executor.scheduler.num_preemptions > before
        llm.check_integrity()
    for case, output, expected in zip(cases, outputs, plain, strict=True):
        assert_same(case, output, expected, oracle)
    assert preempted == (run.setting == "preemption") and bool(chunks) == (run.setting == "chunks")
    assert run.setting != "reuse" or all(output.cached_tokens for output in outputs)
    stats = [output.speculative_decoding or SpeculativeStats() for output in outputs]
    total = sum(stats, SpeculativeStats())
    assert total.acceptance_length > (1.0 if run.mode.startswith("ngram") else 1.3)
    assert len(total.per_position_drafted) == run.depth and total.per_position_drafted[-1] > 0
