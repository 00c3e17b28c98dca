"""Shapes of drafts: rows of a window and tokens that a round may emit."""

from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape, DraftShapes, chain_of


def test_a_chain_has_one_row_for_each_token_that_a_round_may_emit() -> None:
    assert (chain_of(4).window, chain_of(4).path, chain_of(4).is_tree) == (5, 5, False)
    assert (NO_DRAFTS.window, NO_DRAFTS.path) == (1, 1)


def test_a_tree_has_more_rows_than_a_round_may_emit() -> None:
    tree = DraftShape(depth=3, num_nodes=16, topk=4)
    assert (tree.window, tree.path, tree.is_tree) == (17, 4, True)


def test_the_longest_length_is_the_one_whose_window_still_fits() -> None:
    shapes = DraftShapes([NO_DRAFTS, DraftShape(1, 4, 4), DraftShape(2, 16, 4)])
    assert [shapes.tier_within(rows) for rows in (0, 1, 4, 5, 16, 17, 99)] == [
        *(0, 0, 0),
        *(1, 1),
        *(2, 2),
    ]
