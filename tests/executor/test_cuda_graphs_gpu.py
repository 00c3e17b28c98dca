"""CUDA graphs of rounds on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.graph_rounds import DUMMY, MODES, graphs_of, on_cuda, speculate, submit_mixture
from tests.executor.harness import output_of, user_provided
from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape
from tllm_spec.executor.batch import SampledTokens
from tllm_spec.executor.device.transfer import ToHost
from tllm_spec.executor.request import RequestState

MODES_HERE = [*MODES, "eagle3_sa", "eagle3_two_model_sa"]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES_HERE)
def test_on_a_gpu_rounds_without_drafts_are_graphs_of_draft_length_0(
    tiny: Path, tiny_draft: Path, head: Path, mode: str
) -> None:
    harness = on_cuda(tiny, [1, 4], **speculate(tiny_draft, head, mode))
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
    tiny: Path, tiny_draft: Path, head: Path, mode: str, is_sampled: bool
) -> None:
    speculation = speculate(tiny_draft, head, mode)
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
    tiny: Path, tiny_draft: Path, head: Path, mode: str
) -> None:
    harness = on_cuda(tiny, [8], **speculate(tiny_draft, head, mode))
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
    tiny: Path, tiny_draft: Path, head: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculation = HOST_DRAFTERS.get(mode) or speculate(tiny_draft, head, mode)
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
