"""Gemma 4's text model: logits, and folders as published."""

from pathlib import Path

import pytest
import torch

from tests.models.gemma4 import KINDS, save_gemma4
from tests.models.helpers import PagedRunner, load

# Of transformers 5.24: the first logits of the first position and of the last one.
TOKENS = [1, 5, 9, 13, 2, 7, 11, 3, 8, 4, 6, 10]
EXPECTED: dict[str, tuple[list[float], list[float], float]] = {
    "dense": (
        [0.09025, 0.51784, -0.23158, 0.70391],
        [1.64492, -0.16184, 0.76245, -0.56981, -0.34259, -0.14759],
        -1.9284,
    ),
    "per layer": (
        [-0.67285, 1.281, -0.8256, 0.258],
        [0.1052, 0.2258, 0.69999, -0.47657, -0.77676, -0.03491],
        4.9417,
    ),
    "experts": (
        [-0.49484, 0.87216, 0.23847, -1.41318],
        [0.83654, -0.04923, 0.66669, 0.55717, -0.04811, 0.50057],
        6.1576,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    save_gemma4(tmp_path, kind)
    first, last, total = EXPECTED[kind]
    found = PagedRunner(load(tmp_path)).step({0: TOKENS})[0]
    torch.testing.assert_close(found[0, :4], torch.tensor(first), rtol=0, atol=1e-4)
    torch.testing.assert_close(found[-1, :6], torch.tensor(last), rtol=0, atol=1e-4)
    assert abs(found[-1].sum().item() - total) < 1e-3
