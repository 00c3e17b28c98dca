"""Rounds with grammars overlap and are graphs: the forward is launched before the host reads the
round before, then masks are filled, then the rest is launched. The text is that without both."""

from pathlib import Path

import pytest

from tests.executor.draft_caches import SMALL_POOL
from tests.executor.draft_graphs import assert_same, captures_without_a_device
from tests.executor.graph_rounds import MODES, num_replays, speculate, with_graphs
from tests.executor.guided_rounds import (
    assert_grammatical,
    events_of,
    grammar_of,
    submit_guided,
)
from tests.executor.harness import Harness, all_pages_are_back
from tests.executor.overlap_rounds import NO_OVERLAP
from tests.executor.test_forward_graphs import forbid_eager_windows
from tests.models.tiny_eagle3 import write_tiny_eagle3

SIZES = (1, 4, 8)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_eagle3(tmp_path_factory.mktemp("head"), num_captured=2)


@pytest.fixture
def depth(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return captures_without_a_device(monkeypatch)


@pytest.mark.parametrize("has_graphs", [False, True])
def test_the_round_before_is_read_and_masks_are_filled_after_the_forward_is_launched(
    tiny: Path, depth: list[int], monkeypatch: pytest.MonkeyPatch, has_graphs: bool
) -> None:
    harness = with_graphs(tiny, SIZES, {0}) if has_graphs else Harness(tiny)
    events = events_of(harness, monkeypatch)
    harness.submit([3, 14, 15], max_tokens=6, grammar=grammar_of("[a-z]*"))
    harness.run()
    rounds = [["forward 0", "fill 0", "sample 0"]]
    rounds += [[f"forward {i}", f"read {i - 1}", f"fill {i}", f"sample {i}"] for i in range(1, 6)]
    assert events == [*sum(rounds, []), "read 5"]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_guided_text_is_that_without_graphs_and_overlap(
    tiny: Path,
    tiny_draft: Path,
    head: Path,
    depth: list[int],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    overlap: bool,
) -> None:
    speculation = speculate(tiny_draft, head, mode)
    options = speculation | ({} if overlap else NO_OVERLAP)
    lengths = {0, 1, 2, 3} if speculation else {0}
    harness = with_graphs(tiny, SIZES, lengths, **options)
    eager = Harness(tiny, **speculation, **NO_OVERLAP)
    ours, theirs = submit_guided(harness), submit_guided(eager)
    forbid_eager_windows(harness, monkeypatch, depth)
    harness.run()
    eager.run()
    assert_same(ours, theirs)
    assert_grammatical(ours)
    assert {len(harness.responses[r.request_id]) for r in ours} == {1}
    assert all_pages_are_back(harness.executor)
