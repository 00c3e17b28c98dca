"""What is counted in a captured graph."""

import pytest
import torch

from tllm_spec.kernels import graph_nodes
from tllm_spec.kernels.graph_nodes import num_other_nodes


@pytest.mark.gpu
@torch.inference_mode()
def test_memsets_and_copies_are_no_kernels() -> None:
    pytest.importorskip("cuda.bindings")
    x, y = torch.ones(64, device="cuda"), torch.ones(64, device="cuda")
    assert num_other_nodes(lambda: x.add_(y)) == 0
    assert num_other_nodes(lambda: (x.add_(y), x.zero_(), y.copy_(x), y.add_(x))) == 2


def test_without_cuda_python_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("there is no device to run on")

    monkeypatch.setattr(graph_nodes, "is_installed", lambda: False)
    assert num_other_nodes(fail) == 0
