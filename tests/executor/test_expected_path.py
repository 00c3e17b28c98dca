"""Expected accepted drafts of a tree, against every path of the tree written out."""

from itertools import product
from math import prod

import pytest

from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape, chain_of
from tllm_spec.executor.speculative.draft_length.estimates import expected_accepted

RATES = [[0.6, 0.2, 0.1], [0.5, 0.25, 0.05], [0.4, 0.2, 0.2]]


@pytest.mark.parametrize(("depth", "topk", "num_nodes"), [(3, 3, 7), (3, 2, 14), (2, 3, 30)])
def test_a_dynamic_tree_has_the_likeliest_paths(depth: int, topk: int, num_nodes: int) -> None:
    paths = [path for length in range(1, depth + 1) for path in product(range(topk), repeat=length)]
    chances = sorted(
        (prod(RATES[d][r] for d, r in enumerate(path)) for path in paths), reverse=True
    )
    found = expected_accepted(DraftShape(depth, num_nodes, topk), RATES)
    assert found == pytest.approx(sum(chances[:num_nodes]))


def test_a_chain_and_a_static_tree_have_their_own_paths() -> None:
    assert expected_accepted(chain_of(3), RATES) == pytest.approx(0.6 + 0.3 + 0.12)
    assert expected_accepted(NO_DRAFTS, RATES) == 0.0
    choices = ((0,), (2,), (2, 1))
    assert expected_accepted(DraftShape(2, 3, 3, choices), RATES) == pytest.approx(0.725)
