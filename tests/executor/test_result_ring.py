"""Results that graphs send to the host by themselves: which entry is read, and that a wrong count
is noticed."""

import pytest
import torch

from tests.executor.graph_rounds import Event
from tllm_spec.config.draft_shape import DraftShape, chain_of
from tllm_spec.executor.batch import SampledTokens
from tllm_spec.executor.device.transfer import DEPTH, ResultRing, ToHost
from tllm_spec.executor.graphs.slot_graphs import CudaGraphs, GraphKey

CPU = torch.device("cpu")
DUMMY = 8


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
