"""Rounds of dummy requests before the first request: which they are, that each runs as a real one
does, and that nothing is left of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import one_model
from tests.executor.graph_rounds import Event
from tests.executor.harness import Harness, output_of
from tests.executor.hooks import before_launch, rounds_in_flight
from tllm_spec.config.draft_shape import DraftShape, chain_of
from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.building import rounds
from tllm_spec.executor.building.rounds import CHUNK_ROWS, WarmUp, some_of
from tllm_spec.executor.device.transfer import DEPTH, ResultRing, ToHost
from tllm_spec.executor.graphs.slot_graphs import CudaGraphs, GraphKey, graph_keys
from tllm_spec.executor.rounds.round_reader import LaunchedRound

DUMMY = 8
MODES = ["plain", "draft_target", "eagle3", "eagle3_two_model", "ngram", "adaptive", "rejection"]
KEYS = graph_keys((1, 4, 8), lambda _: {3})


def options(mode: str, tiny_draft: Path, head: Path) -> dict[str, Any]:
    if mode == "plain":
        return {}
    if mode == "ngram":
        return {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}}
    if mode == "adaptive":
        return one_model(tiny_draft, head, "eagle3", adaptive={"candidate_steps": [0, 1, 3]})
    if mode == "rejection":
        return one_model(tiny_draft, head, "draft_target", use_rejection_sampling=True)
    return one_model(tiny_draft, head, mode)


@pytest.fixture(params=MODES)
def both(
    request: pytest.FixtureRequest, tiny: Path, drafts: tuple[Path, Path], head: Path
) -> Iterator[Any]:
    """Two engines of one kind, and what of drafts is the same in both: not what follows the times
    of rounds."""
    yield (
        [
            Harness(tiny, max_num_tokens=512, **options(request.param, drafts[0], head))
            for _ in range(2)
        ],
        request.param != "adaptive",
    )


def keys_of(harness: Harness) -> list[GraphKey]:
    return [
        GraphKey(size, chain_of(min(steps, harness.max_draft_len)), s)
        for size, steps, s in map(tuple_of, KEYS)
    ]


def tuple_of(key: GraphKey) -> tuple[int, int, bool]:
    return key.batch_size, key.shape.depth, key.sampled


def state_of(harness: Harness) -> list[torch.Tensor]:
    """What requests can ever see: all slots but the dummy, all pages but the dummy's."""
    slots, pool, table = (
        harness.parts.slots,
        harness.parts.kv.groups[0].pools[0],
        harness.parts.kv.groups[0].table,
    )
    state = [slots.kv_lens, slots.window, slots.num_drafts, slots.previous_token, table.device_rows]
    return [tensor[:DUMMY].clone() for tensor in state] + [pool.data[:, :, 1:].clone()]


@pytest.mark.thinned(6)
@torch.inference_mode()
def test_nothing_that_requests_see_is_changed_and_texts_are_those_of_an_engine_without_it(
    both: Any,
) -> None:
    (warm, cold), same_drafts = both
    before = state_of(warm)
    WarmUp(warm.parts.runner, DUMMY, max_num_tokens=512, max_len=256).run(keys_of(warm))
    assert all(map(torch.equal, before, state_of(warm)))
    assert not warm.parts.slots.kv_lens.any() and not warm.parts.sampler.groups._kept
    warm.executor.check_integrity()
    for harness in (warm, cold):
        requests = [
            harness.submit([5, 9, 2, i], max_tokens=30, temperature=i % 2, seed=i) for i in range(6)
        ]
        harness.run()
        assert not any(request.error for request in requests)
        harness.texts = [output_of(request) for request in requests]
        harness.accepted = [request.counters.by_accepted for request in requests]
    assert warm.texts == cold.texts
    assert warm.accepted == cold.accepted or not same_drafts


def launched_by(harness: Harness, max_num_tokens: int) -> list[Any]:
    found: list[Any] = []

    def look(batch: ScheduledBatch) -> None:
        sampled = any(request.rules.temperature for request in batch.requests())
        rows = sum(request.context_chunk for request in batch.context_requests)
        lens = {request.num_tokens_bound for request in batch.generation_requests}
        windows = (len(batch.generation_requests), *lens, batch.shape.depth)
        found.append((rows, windows, batch.new_shape.depth, sampled))

    before_launch(harness.executor, look)
    with torch.inference_mode():
        WarmUp(harness.parts.runner, DUMMY, max_num_tokens=max_num_tokens, max_len=256).run(KEYS)
    return found


def test_rounds_are_the_longest_context_short_ones_and_contexts_with_few_some_and_many_windows(
    tiny: Path, drafts: tuple[Path, Path], head: Path
) -> None:
    harness = Harness(tiny, max_num_tokens=512, **options("eagle3", drafts[0], head))
    assert launched_by(harness, 512) == [
        (512, (0, 0), 3, False),
        (512, (0, 0), 3, True),
        *((rows, (0, 0), 3, False) for rows in (16, 32, 64, 128, 256)),
        (512 - 4, (1, 1, 3), 3, False),
        (512 - 4, (1, 256, 3), 3, False),
        (512 - 16, (4, 1, 3), 3, False),
        (512 - 16, (4, 256, 3), 3, False),
        (512 - 32, (8, 1, 3), 3, False),
        (512 - 32, (8, 256, 3), 3, False),
        (512 - 32, (8, 1, 3), 3, True),
        (512 - 32, (8, 256, 3), 3, True),
    ]


def test_no_round_has_more_rows_than_a_round_may_have(
    tiny: Path, drafts: tuple[Path, Path], head: Path
) -> None:
    harness = Harness(tiny, max_num_tokens=512, **options("eagle3", drafts[0], head))
    found = launched_by(harness, 20)
    expected = [(20, 0)] * 2 + [(16, 0)] + [(16, 1)] * 2 + [(4, 4)] * 2
    assert [(rows, windows[0]) for rows, windows, *_ in found] == expected


def test_chosen_are_windows_of_the_shortest_and_the_longest_draft_length() -> None:
    keys = graph_keys((1, 2, 4, 8, 16), lambda _: {0, 1, 2, 5})
    assert some_of(keys) == sorted(
        [GraphKey(size, chain_of(k), False) for size in (1, 4, 16) for k in (0, 5)]
        + [GraphKey(16, chain_of(k), True) for k in (0, 5)]
    )
    assert some_of([]) == []
    assert some_of([GraphKey(4, chain_of(2), False)]) == [GraphKey(4, chain_of(2), False)]
    assert CHUNK_ROWS > 1536, "contexts with windows would be a graph of their own"


def test_where_the_memory_does_not_suffice_the_message_says_what_to_lower(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tiny)

    def fail(batch: ScheduledBatch) -> LaunchedRound:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(harness.parts.runner, "launch", fail)
    warm_up = WarmUp(harness.parts.runner, DUMMY, max_num_tokens=512, max_len=256)
    with pytest.raises(
        ValueError,
        match=r"round of 512 context tokens .* lower max_num_tokens or kv_cache_config\.free",
    ):
        warm_up.run([])


def test_an_engine_on_a_cpu_has_nothing_to_warm_up(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "WarmUp", None)
    harness = Harness(tiny)
    request = harness.submit([5, 9, 2], max_tokens=3)
    harness.run()
    assert request.num_output_tokens == 3


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["plain", "eagle3"])
def test_on_a_gpu_contexts_with_windows_compile_no_attention_after_the_warm_up(
    tiny: Path, drafts: tuple[Path, Path], head: Path, mode: str
) -> None:
    from tllm_spec.kernels.attention.window_attention_triton import attention_kernel

    def compiled() -> int:
        return len(attention_kernel.device_caches[torch.cuda.current_device()][0])

    harness = Harness(
        tiny,
        device="cuda",
        max_num_tokens=64,
        enable_chunked_prefill=True,
        **options(mode, drafts[0], head),
    )
    before, num_mixed = compiled(), 0
    for length in range(1, 60):
        harness.submit([7] * length, max_tokens=3 + length % 5)
        harness.round()
        batch = rounds_in_flight(harness.executor)[-1].batch
        num_mixed += bool(batch.context_requests and batch.generation_requests)
    harness.run()
    assert num_mixed > 40 and compiled() == before


# Results that graphs send to the host by themselves: which entry is read, and that a wrong count
# is noticed.


CPU = torch.device("cpu")


def send(ring: ResultRing, value: int, num_rows: int = 2, width: int = 3) -> ToHost:
    """A round whose tokens are all `value`, and lengths 1."""
    ring.send(torch.ones(num_rows, dtype=torch.int64), torch.full((num_rows, width), value))
    return ring.sent(num_rows, width)


def tokens_of(results: ToHost) -> set[int]:
    (table,) = results.wait()
    assert (table[:, 0] == 1).all()
    return set(table[:, 1:].flatten().tolist())


def test_a_round_is_read_when_the_next_ones_are_under_way() -> None:
    ring = ResultRing(8, CPU)
    rounds = [send(ring, value) for value in range(DEPTH)]
    assert [tokens_of(each) for each in rounds] == [{value} for value in range(DEPTH)]
    for value in range(10, 20):
        rounds.append(send(ring, value))
        assert rounds[-1].is_here and tokens_of(rounds[-2]) == (
            {value - 1} if value > 10 else {DEPTH - 1}
        )


def test_rounds_of_other_sizes_share_the_ring() -> None:
    ring = ResultRing(8, CPU)
    sizes = [(2, 3), (1, 1), (4, 1), (1, 7), (2, 3), (2, 1), (1, 3)]
    for value, (num_rows, width) in enumerate(sizes * 3):
        (table,) = send(ring, value, num_rows, width).wait()
        assert table.tolist() == [[1, *[value] * width]] * num_rows


def test_the_padding_of_a_graph_is_not_read() -> None:
    ring = ResultRing(16, CPU)
    ring.send(torch.tensor([1, 2, 9, 9]), torch.tensor([[5, 0], [6, 7], [9, 9], [9, 9]]))
    assert ring.sent(2, 2).wait()[0].tolist() == [[1, 5, 0], [2, 6, 7]]


def test_a_round_that_was_overwritten_before_it_was_read_is_noticed() -> None:
    ring = ResultRing(8, CPU)
    first = send(ring, 1)
    for value in range(DEPTH):
        send(ring, value)
    with pytest.raises(AssertionError, match=f"results {DEPTH} are where 0 should be"):
        first.wait()


@pytest.mark.parametrize("number", range(1, 2 * DEPTH))
def test_count_again_takes_over_results_that_were_not_announced(number: int) -> None:
    ring = ResultRing(8, CPU)
    for _ in range(number):
        ring.send(torch.ones(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))
    ring.count_again()
    assert [tokens_of(send(ring, value)) for value in (6, 7)] == [{6}, {7}]


def test_graphs_that_were_captured_and_timed_answer_with_their_own_results(
    eager_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)

    def generate(slot_ids: torch.Tensor, shape: DraftShape, sampled: bool) -> SampledTokens:
        tokens = slot_ids.unsqueeze(1) * 10 + torch.arange(shape.path)
        return SampledTokens(tokens, torch.full_like(slot_ids, shape.path))

    graphs = CudaGraphs(generate, DUMMY, CPU)
    graphs.capture(
        [GraphKey(size, chain_of(draft_len), False) for size in (1, 4) for draft_len in (0, 2)]
    )
    under_way = []
    for slots, draft_len in [([3], 0), ([1, 2, 5], 2), ([1, 2], 0), ([4], 2)] * 3:
        graphs.seconds(GraphKey(4, chain_of(2), False))
        replayed = graphs.replay(slots, chain_of(draft_len), False)
        assert replayed is not None and replayed.to_host is not None
        table = [[1 + draft_len, *range(10 * slot, 10 * slot + 1 + draft_len)] for slot in slots]
        assert replayed.table().tolist() == table
        under_way.append((replayed.to_host, table))
        assert under_way[-1][0].wait()[0].tolist() == under_way[-1][1]
