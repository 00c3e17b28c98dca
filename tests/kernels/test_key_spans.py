"""Layers that see a part of the keys: trees that are cut, and that the kernels compile for Hopper
with each kind of span, which needs no device."""

import pytest
import torch

from tests.kernels.tree_problem import bits_of
from tllm_spec.kernels.attention.visible_keys import KeySpan, KeySpans, TreeMask


def test_a_row_of_a_tree_keeps_the_keys_of_its_path_that_its_span_has() -> None:
    # Position 14 is before the region; the region's first key has position 15.
    paths = [[0], [0, 1], [0, 1, 2], [0, 3], [0, 1, 2, 63]]
    positions = torch.tensor([15, 16, 17, 16, 18])
    mask = TreeMask(torch.tensor([bits_of(paths)]), 64)
    for size, kept in {
        16: [[0], [1], [1, 2], [3], [1, 2, 63]],
        17: [[0], [0, 1], [2], [0, 3], [2, 63]],
        1: [[0], [1], [2], [3], [63]],
        15: paths,
    }.items():
        spans = KeySpans(KeySpan(size, slides=False), positions)
        assert spans.cut(mask).bits.tolist() == [bits_of(kept)]
    for size, kept in {
        1: [[0], [1], [2], [3], [63]],
        2: [[0], [0, 1], [1, 2], [0, 3], [2, 63]],
        4: paths,
    }.items():
        spans = KeySpans(KeySpan(size, slides=True), positions)
        assert spans.cut(mask).bits.tolist() == [bits_of(kept)]


@pytest.mark.parametrize("slides", [False, True], ids=["chunks", "sliding"])
def test_the_first_key_is_the_same_on_the_host_and_on_the_device(slides: bool) -> None:
    span, positions = KeySpan(16, slides=slides), [0, 14, 15, 16, 17, 40]
    found = KeySpans(span, torch.tensor(positions)).first_keys().tolist()
    assert found == [span.first_key(position) for position in positions]
    assert found == ([0, 0, 0, 1, 2, 25] if slides else [0, 0, 0, 16, 16, 32])
