"""CUDA graphs of rounds: which one is replayed, and that texts are those of eager rounds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.graph_rounds import (
    CPU,
    DUMMY,
    MODES,
    Speculate,
    graphs_of,
    num_replays,
    on_cuda,
    submit_mixture,
    with_graphs,
)
from tests.executor.harness import Harness, draft_target, output_of, user_provided
from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape, chain_of
from tllm_spec.executor.batch import SampledTokens
from tllm_spec.executor.device.transfer import ToHost
from tllm_spec.executor.graphs.slot_graphs import CudaGraphs, GraphKey, GraphPool, graph_keys
from tllm_spec.executor.request import RequestState


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
    tiny: Path, speculate: Speculate, eager_graphs: None, mode: str, is_sampled: bool
) -> None:
    speculation = speculate(mode)
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
    tiny: Path, speculate: Speculate, eager_graphs: None, mode: str
) -> None:
    speculation = speculate(mode)
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


# On a GPU.


MODES_HERE = [*MODES, "eagle3_sa", "eagle3_two_model_sa"]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES_HERE)
def test_on_a_gpu_rounds_without_drafts_are_graphs_of_draft_length_0(
    tiny: Path, speculate: Speculate, mode: str
) -> None:
    harness = on_cuda(tiny, [1, 4], **speculate(mode))
    graphs: Any = graphs_of(harness)
    replay, lengths = graphs.replay, []

    def watched(slots: list[int], shape: DraftShape, sampled: bool) -> SampledTokens | None:
        result = replay(slots, shape, sampled)
        lengths.append(shape.depth if result is not None else None)
        return result

    graphs.replay = watched
    requests = [harness.submit([i, 2, 3], max_tokens=40, draft_limit=0) for i in range(3)]
    harness.run()
    assert lengths == [0] * 39 and all(request.num_output_tokens == 40 for request in requests)


@pytest.mark.gpu
@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", MODES_HERE)
def test_on_a_gpu_a_replayed_round_is_the_eager_one(
    tiny: Path, speculate: Speculate, mode: str, is_sampled: bool
) -> None:
    speculation = speculate(mode)
    harness, eager = (on_cuda(tiny, sizes, **speculation) for sizes in ([1, 4, 8], None))
    graphs = graphs_of(harness)
    replay, num_replayed = graphs.replay, []

    def watched(slots: list[int], draft_len: int, sampled: bool) -> SampledTokens | None:
        result = replay(slots, draft_len, sampled)
        num_replayed.append(0 if result is None else len(slots))
        return result

    graphs.replay = watched  # type: ignore[method-assign] # a spy on this one object
    ours, theirs = (submit_mixture(each, 7, is_sampled) for each in (harness, eager))
    harness.run()
    eager.run()
    assert len(num_replayed) > 10 and {1, 7} <= set(num_replayed)
    assert list(map(output_of, ours)) == list(map(output_of, theirs))
    assert [r.counters.by_accepted for r in ours] == [r.counters.by_accepted for r in theirs]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES_HERE)
def test_on_a_gpu_the_dummy_slot_of_padded_batches_does_not_grow(
    tiny: Path, speculate: Speculate, mode: str
) -> None:
    harness = on_cuda(tiny, [8], **speculate(mode))
    submit_mixture(harness, 3, is_sampled=True)
    while harness.round():
        assert harness.parts.slots.kv_lens[DUMMY].item() <= 1 + harness.max_draft_len
    assert not harness.parts.kv.groups[0].table.device_rows[DUMMY].any()
    with torch.inference_mode():
        harness.parts.slots.reset_dummy()
    assert harness.parts.slots.kv_lens[DUMMY].item() == 0


@pytest.mark.gpu
def test_on_a_gpu_a_batch_above_the_largest_graph_runs_without(tiny: Path) -> None:
    harness, eager = on_cuda(tiny, [2]), on_cuda(tiny, None)
    assert graphs_of(harness).replay([0, 1, 2], NO_DRAFTS, False) is None
    ours, theirs = (submit_mixture(each, 5, False) for each in (harness, eager))
    harness.run()
    eager.run()
    assert list(map(output_of, ours)) == list(map(output_of, theirs))


@pytest.mark.gpu
def test_on_a_gpu_running_out_of_memory_while_capturing_says_which_options_to_lower(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **keywords: Any) -> None:
        raise torch.cuda.OutOfMemoryError("no more")

    monkeypatch.setattr(torch.cuda, "graph", fail)
    with pytest.raises(
        ValueError, match="out of memory while the CUDA graph of 8 requests with 0 drafts"
    ):
        on_cuda(tiny, [1, 8])


# Steady rounds on a GPU wait for the device nowhere but where a round's results are read.


HOST_DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}},
    "ngram_tree": {
        "speculative_config": {
            "decoding_type": "NGram",
            "max_draft_len": 3,
            "use_dynamic_tree": True,
            "dynamic_tree_max_topK": 2,
        }
    },
    "user_provided": user_provided(lambda request: [1, 2, 3][: request.num_drafts_wanted], 3),
    "user_provided_tree": user_provided(
        lambda request: [[1, 2, 3][: request.num_drafts_wanted], [4]], 3, max_total_draft_tokens=5
    ),
}
NUM_ROUNDS = 12


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [*MODES, *HOST_DRAFTERS])
def test_on_a_gpu_a_steady_round_waits_only_where_a_round_is_read(
    tiny: Path, speculate: Speculate, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculation = HOST_DRAFTERS.get(mode) or speculate(mode)
    harness = on_cuda(tiny, [4], **speculation)
    # Repetitions, so that NGram finds drafts.
    requests = [harness.submit([5, i, 7] * 4, max_tokens=150) for i in range(3)]
    for request in requests:
        harness.run_until(request, RequestState.GENERATION)
    harness.rounds(3)
    waits, wait = [], ToHost.wait

    def counted(to_host: ToHost) -> list[torch.Tensor]:
        waits.append(to_host)
        return wait(to_host)

    monkeypatch.setattr(ToHost, "wait", counted)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(NUM_ROUNDS):
            assert harness.executor.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == NUM_ROUNDS and not any(request.is_finished for request in requests)
    num_drafted = sum(request.counters.stats().num_drafted_tokens for request in requests)
    assert bool(num_drafted) == (mode != "plain")
    harness.run()
