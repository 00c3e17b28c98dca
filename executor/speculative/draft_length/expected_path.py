"""How many drafts of a tree are accepted on average, from acceptance by depth and child rank."""

from collections.abc import Sequence
from heapq import heappop, heappush
from math import prod

from tllm_spec.config.draft_shape import DraftShape

# By drafts on the path so far, then by rank: the probability that it continues to that child.
RankRates = Sequence[Sequence[float]]


def expected_accepted(shape: DraftShape, rates: RankRates) -> float:
    """Drafts of a round that are accepted on average. rates: of `shape.depth` depths and
    `shape.topk` ranks.

    A node counts with the probability that the accepted path has it. A dynamic tree has the
    likeliest nodes, as if a draft network knew these rates and nothing else; a real one knows more
    about each token."""
    if shape.choices:
        return sum(
            prod(rates[depth][rank] for depth, rank in enumerate(path)) for path in shape.choices
        )
    if not shape.num_nodes:
        return 0.0
    expected = 0.0
    heap = [(-rates[0][0], 0, 0, 1.0)]  # minus a node's probability, depth, rank, its parent's
    for _ in range(shape.num_nodes):
        if not heap:
            break
        negative, depth, rank, parent = heappop(heap)
        expected -= negative
        if depth + 1 < shape.depth:
            heappush(heap, (negative * rates[depth + 1][0], depth + 1, 0, -negative))
        if rank + 1 < shape.topk:
            heappush(heap, (-parent * rates[depth][rank + 1], depth, rank + 1, parent))
    return expected
