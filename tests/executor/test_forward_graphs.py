"""A round in which a request's rules need more than a round's graph knows: its forward is a graph
nevertheless; text, drafts and log probabilities are those of eager rounds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import HOT
from tests.executor.draft_graphs import DUMMY, assert_same
from tests.executor.graph_rounds import MODES, on_cuda, replays_of, speculate, with_graphs
from tests.executor.harness import Harness, all_pages_are_back
from tllm_spec.config.draft_shape import NO_DRAFTS
from tllm_spec.executor.request import LlmRequest

SIZES = (1, 4, 8)
RULES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    "log probabilities": {"logprobs": 3},
    "bias": {"logit_bias": {7: 4.0, 9: -3.0}},
    "bad words": {"bad_token_ids": [[3, 5], [8]]},
}


def submit_rules(harness: Harness, rules: dict[str, Any]) -> list[LlmRequest]:
    """Seven requests that end one by one; the third and the last, which is alone in the end, have
    the rules."""
    return [
        harness.submit(
            [3 + i, 5, 2 * i],
            max_tokens=6 + 5 * i + 20 * (i == 6),
            temperature=HOT if i % 2 else None,
            seed=i,
            **(rules if i in (2, 6) else {}),
        )
        for i in range(7)
    ]


def forwards_of(harness: Harness) -> dict[tuple[int, int], int]:
    """Replays by batch size and draft length."""
    graphs = harness.parts.runner.graphs
    assert graphs is not None
    found = replays_of(graphs.forwards)
    return {(key.batch_size, key.shape.depth): number for key, number in found.items()}


def logprobs_of(harness: Harness, request: LlmRequest) -> list[dict[int, Any]]:
    """Ranks, and values but for their rounding: a padded batch has another number of rows."""
    return [
        {
            token: (found.rank, pytest.approx(found.logprob, abs=1e-4))
            for token, found in entry.items()
        }
        for response in harness.responses[request.request_id]
        for entry in response.logprobs
    ]


def forbid_eager_windows(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, depth: list[int]
) -> None:
    """From now on a forward of windows only fails, if it is not in a graph."""
    engine = harness.parts.runner.engine
    forward = engine.forward

    def watched(contexts: Any, windows: Any, *others: Any) -> torch.Tensor:
        assert contexts or depth, "windows were launched kernel by kernel"
        return forward(contexts, windows, *others)

    monkeypatch.setattr(engine, "forward", watched)


@pytest.mark.thinned(12)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("mode", MODES)
def test_the_forward_of_any_windows_is_a_graph_and_the_text_that_without(
    tiny: Path,
    tiny_draft: Path,
    head: Path,
    depth: list[int],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    rules: str,
) -> None:
    speculation = speculate(tiny_draft, head, mode)
    lengths = {0, 1, 2, 3} if speculation else {0}
    harness, eager = with_graphs(tiny, SIZES, lengths, **speculation), Harness(tiny, **speculation)
    ours, theirs = (submit_rules(each, RULES[rules]) for each in (harness, eager))
    forbid_eager_windows(harness, monkeypatch, depth)
    harness.run()
    eager.run()
    assert_same(ours, theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert logprobs_of(harness, mine) == logprobs_of(eager, other)
        assert bool(logprobs_of(harness, mine)) == (mine.rules.logprobs is not None)
    assert {size for size, _ in forwards_of(harness)} == set(SIZES)
    assert all_pages_are_back(harness.executor)


@torch.inference_mode()
def test_all_forward_graphs_write_their_hidden_states_to_one_buffer(
    tiny: Path, depth: list[int]
) -> None:
    runner = with_graphs(tiny, SIZES, {0}).parts.runner
    left = [
        runner.decode._forward(torch.tensor(slots), NO_DRAFTS, False)
        for slots in ([DUMMY], [DUMMY, DUMMY])
    ]
    assert left[0].data_ptr() == left[1].data_ptr() and list(map(len, left)) == [1, 2]


def test_requests_without_such_rules_still_have_rounds_that_are_one_graph(
    tiny: Path, depth: list[int]
) -> None:
    harness = with_graphs(tiny, SIZES, {0})
    submit_rules(harness, {})
    harness.run()
    assert not forwards_of(harness)


@pytest.mark.gpu
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_a_replayed_forward_is_the_eager_one(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, rules: str
) -> None:
    speculation = speculate(tiny_draft, head, mode)
    harness, eager = (on_cuda(tiny, sizes, **speculation) for sizes in (list(SIZES), None))
    rounds, num_replayed = harness.parts.runner.graphs, list[int]()
    assert rounds is not None
    graphs, run = rounds.forwards, rounds.forwards.run

    def watched(slots: list[int], draft_len: int, sampled: bool) -> Any:
        found = run(slots, draft_len, sampled)
        num_replayed.append(0 if found is None else len(slots))
        return found

    graphs.run = watched  # type: ignore[method-assign] # a spy on this one object
    ours, theirs = (submit_rules(each, RULES[rules]) for each in (harness, eager))
    harness.run()
    eager.run()
    assert_same(ours, theirs)
    assert len(num_replayed) > 10 and {1, 7} <= set(num_replayed)
    assert all_pages_are_back(harness.executor)
