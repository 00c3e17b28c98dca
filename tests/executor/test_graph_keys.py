"""Which CUDA graphs of rounds are captured."""

from pathlib import Path
from typing import Any

import pytest

from tests.executor.graph_rounds import keys_of_build, speculate
from tllm_spec.config.llm_args import CudaGraphConfig
from tllm_spec.config.speculative_config import NGramDecodingConfig, UserProvidedDecodingConfig
from tllm_spec.executor.building.plan import tiers_of_rounds
from tllm_spec.executor.graphs.slot_graphs import graph_keys
from tllm_spec.executor.speculative.draft_length.adaptive import controller_for


def config(**options: Any) -> NGramDecodingConfig:
    return NGramDecodingConfig(max_draft_len=4, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_concurrency": 5},
        {"draft_len_schedule": {1: 4, 3: 2, 7: 0}},
        {"draft_len_schedule": {1: 4, 4: 1}},
    ],
)
@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (3, 8), (8,), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_keys_are_exactly_the_combinations_that_batches_can_have(
    options: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    spec = config(**options)
    keys = graph_keys(sizes, controller_for(spec).tiers_at)
    padded = {n: min(size for size in sizes if size >= n) for n in range(1, 9)}
    needed = {
        (padded[n], controller_for(spec).tier_for(n), sampled)
        for n in padded
        for sampled in (False, True)
    }
    assert {(key.batch_size, key.shape.depth, key.sampled) for key in keys} == needed
    assert len(keys) == len(needed)


def test_drafters_that_may_come_with_fewer_drafts_have_a_graph_for_every_length() -> None:
    schedule = {1: 3, 3: 1}
    spec = UserProvidedDecodingConfig(
        drafter="tllm_spec.examples.copy_drafter:CopyDrafter",
        max_draft_len=4,
        draft_len_schedule=schedule,
    )
    keys = graph_keys((2, 4), tiers_of_rounds(controller_for(spec), spec))
    lengths = {size: {key.shape.depth for key in keys if key.batch_size == size} for size in (2, 4)}
    assert lengths == {2: {0, 1, 2, 3}, 4: {0, 1}}


def test_sizes_end_where_the_schedule_changes_so_that_no_batch_pads_beyond() -> None:
    schedule = {1: 4, 6: 0}
    sizes = CudaGraphConfig(batch_sizes=(1, 8)).sizes(
        8, [size - 1 for size in schedule if size > 1]
    )
    spec = config(draft_len_schedule=schedule)
    keys = graph_keys(sizes, controller_for(spec).tiers_at)
    assert {(key.batch_size, key.shape.depth) for key in keys} == {(1, 4), (5, 4), (8, 0)}


def test_the_keys_of_a_build_follow_the_mode_and_the_schedule(
    tiny: Path, tiny_draft: Path, head: Path
) -> None:
    cuts = {"draft_len_schedule": {1: 3, 6: 1}}

    def pairs(mode: str, **options: Any) -> set[tuple[int, int]]:
        keys = keys_of_build(tiny, **speculate(tiny_draft, head, mode, **options))
        return {(key.batch_size, key.shape.depth) for key in keys}

    assert pairs("plain") == {(1, 0), (2, 0), (4, 0), (8, 0)}
    for mode in ("draft_target", "eagle3"):
        plain = {(1, 0), (2, 0), (4, 0), (8, 0)}  # rounds without drafts
        assert pairs(mode) == plain | {(1, 3), (2, 3), (4, 3), (8, 3)}
        assert pairs(mode, **cuts) == plain | {(5, 0)} | {(1, 3), (2, 3), (4, 3), (5, 3), (8, 1)}
    # The draft model may have no pages for drafts.
    assert pairs("draft_target_two_model", **cuts) >= {(4, 0), (4, 3), (8, 0), (8, 1)}
    assert keys_of_build(tiny, cuda_graph_config=None) == []


@pytest.mark.parametrize("mode", ["eagle3", "draft_target", "eagle3_two_model"])
def test_no_graph_has_more_rows_than_the_buffers_of_a_round(
    tiny: Path, tiny_draft: Path, head: Path, mode: str
) -> None:
    keys = keys_of_build(tiny, max_num_tokens=20, **speculate(tiny_draft, head, mode))
    assert keys and all(key.batch_size * (1 + key.shape.depth) <= 20 for key in keys)
