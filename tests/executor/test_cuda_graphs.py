"""CUDA graphs of rounds: which one is replayed, and that texts are those of eager rounds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.graph_rounds import (
    CPU,
    DUMMY,
    MODES,
    graphs_of,
    keys_of_build,
    num_replays,
    speculate,
    submit_mixture,
    with_graphs,
)
from tests.executor.harness import Harness, draft_target, output_of
from tllm_spec.config.draft_shape import DraftShape, chain_of
from tllm_spec.executor.batch import SampledTokens
from tllm_spec.executor.graphs.slot_graphs import CudaGraphs, GraphKey, GraphPool, graph_keys


def test_slot_ids_are_sent_only_when_they_change(
    eager_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[int]] = []
    seen: list[list[int]] = []

    def generate(slot_ids: torch.Tensor, shape: DraftShape, sampled: bool) -> SampledTokens:
        seen.append(slot_ids.tolist())
        return SampledTokens(slot_ids.unsqueeze(1).clone(), slot_ids.clone())

    def to_device(values: list[int], device: torch.device) -> torch.Tensor:
        sent.append(values)
        return torch.tensor(values)

    monkeypatch.setattr("tllm_spec.executor.graphs.slot_graphs.to_device", to_device)
    graphs = CudaGraphs(generate, DUMMY, CPU)
    graphs.capture(graph_keys((2, 4), lambda _: {0, 1}))
    seen.clear()
    rounds = [
        [1, 2, 3],
        [1, 2, 3],
        [1, 3, 2],
        [1, 3],
        [1, 3],
        [5],
        [1, 3, 2],
        [1, 3, 2, 8],
        [1, 3, 2],
    ]
    for slots in rounds:
        for draft_len in (0, 1):
            graphs.replay(slots, chain_of(draft_len), False)
    padded = [slots + [DUMMY] * (2 + 2 * (len(slots) > 2) - len(slots)) for slots in rounds]
    assert seen == [slots for slots in padded for _ in (0, 1)]
    assert sent == [
        padded[0],
        *(padded[i] for i in range(1, len(padded)) if padded[i] != padded[i - 1]),
    ]


@pytest.mark.thinned(8)
@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", MODES)
def test_replayed_rounds_give_the_texts_of_eager_rounds(
    tiny: Path, tiny_draft: Path, head: Path, eager_graphs: None, mode: str, is_sampled: bool
) -> None:
    speculation = speculate(tiny_draft, head, mode)
    lengths = {0, 1, 2, 3} if speculation else {0}
    harness, eager = (
        with_graphs(tiny, (1, 4, 8), lengths, **speculation),
        Harness(tiny, **speculation),
    )
    ours, theirs = (submit_mixture(each, 7, is_sampled) for each in (harness, eager))
    harness.run()
    eager.run()
    assert list(map(output_of, ours)) == list(map(output_of, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.counters.by_accepted == other.counters.by_accepted
    assert {key.batch_size for key in num_replays(harness)} == {1, 4, 8}
    # The batch is greedy again when its sampled requests have ended.
    assert any(key.sampled for key in num_replays(harness)) == is_sampled


@pytest.mark.thinned(3)
@pytest.mark.parametrize("mode", MODES)
def test_the_dummy_slot_of_padded_batches_does_not_grow_and_has_no_pages(
    tiny: Path, tiny_draft: Path, head: Path, eager_graphs: None, mode: str
) -> None:
    speculation = speculate(tiny_draft, head, mode)
    harness = with_graphs(tiny, (8,), {0, 1, 2, 3} if speculation else {0}, **speculation)
    slots, table = harness.parts.slots, harness.parts.kv.groups[0].table
    graphs = graphs_of(harness)
    requests = submit_mixture(harness, 3, is_sampled=True)
    while harness.round():
        owners = sum(
            not request.is_finished for request in requests
        )  # the round in flight may have one more
        assert (graphs._slot_ids[owners + 1 :] == DUMMY).all()
        assert (
            slots.kv_lens[DUMMY] <= 1 + harness.max_draft_len
        )  # of the latest round: each begins with 0
    assert sum(num_replays(harness).values()) > 5
    assert not table.device_rows[DUMMY].any()
    with torch.inference_mode():
        slots.kv_lens[DUMMY] = 100
        slots.reset_dummy()
    assert slots.kv_lens[DUMMY] == 0


def test_a_round_that_fits_no_graph_runs_eagerly(tiny: Path, eager_graphs: None) -> None:
    harness, eager = with_graphs(tiny, (1, 2), {0}), Harness(tiny)
    ours, theirs = (
        [each.submit([i, 5], max_tokens=10) for i in range(4)] for each in (harness, eager)
    )
    harness.run()
    eager.run()
    assert not num_replays(harness)  # four at a time, to the end
    assert list(map(output_of, ours)) == list(map(output_of, theirs))
    penalised = [
        each.submit([1, 2], max_tokens=10, presence_penalty=0.5) for each in (harness, eager)
    ]
    harness.run()
    eager.run()
    assert not num_replays(harness)  # rules that a graph does not have
    assert output_of(penalised[0]) == output_of(penalised[1])
    simple = [each.submit([1, 2], max_tokens=10) for each in (harness, eager)]
    harness.run()
    eager.run()
    assert num_replays(harness) == {GraphKey(1, chain_of(0), False): 9}
    assert output_of(simple[0]) == output_of(simple[1])


def test_without_padding_only_batches_of_a_captured_size_are_replayed(
    tiny: Path, eager_graphs: None
) -> None:
    harness = with_graphs(tiny, (1, 4, 8), {0}, pads=False)
    submit_mixture(harness, 7, is_sampled=False)  # they end one by one
    harness.run()
    assert num_replays(harness).keys() == {
        GraphKey(1, chain_of(0), False),
        GraphKey(4, chain_of(0), False),
    }


def test_running_out_of_memory_while_capturing_says_which_options_to_lower(
    tiny: Path, eager_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(pool: GraphPool, work: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("no more")

    monkeypatch.setattr(GraphPool, "capture", fail)
    message = "out of memory .* of 8 requests with 3 drafts .*max_batch_size, max_draft_len"
    with pytest.raises(ValueError, match=message):
        with_graphs(tiny, (1, 8), {3}, **draft_target(tiny, 3, draft_target_one_model=True))


def test_every_candidate_of_an_adaptive_draft_length_has_a_graph_and_a_measured_time(
    tiny: Path, tiny_draft: Path, head: Path
) -> None:
    options = {"adaptive": {"candidate_steps": [0, 1, 3]}}
    keys = keys_of_build(tiny, **speculate(tiny_draft, head, "eagle3", **options))
    assert {(key.batch_size, key.shape.depth) for key in keys} == {
        (size, steps) for size in (1, 2, 4, 8) for steps in (0, 1, 3)
    }
    gate = {"acceptance_rate_threshold": 0.5, "acceptance_rate_window_size": 4}
    keys = keys_of_build(tiny, **speculate(tiny_draft, head, "eagle3", **gate))
    assert {key.shape.depth for key in keys} == {0, 3}
