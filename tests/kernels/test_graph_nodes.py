"""What is counted in a captured graph."""

import pytest
import torch

from tllm_spec.kernels import graph_nodes
from tllm_spec.kernels.graph_nodes import num_other_nodes


@pytest.mark.gpu
@torch.inference_mode()
def test_a_memset_is_no_kernel() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    x, y = torch.ones(64, device="cuda"), torch.ones(64, device="cuda")

    def with_memset() -> None:
        x.add_(y)
        stream = torch.cuda.current_stream().cuda_stream
        runtime.cudaMemsetAsync(x.data_ptr(), 0, x.nbytes, stream)
        y.add_(x)

    assert num_other_nodes(lambda: x.add_(y)) == 0
    assert num_other_nodes(with_memset) == 1


def test_without_cuda_python_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("there is no device to run on")

    monkeypatch.setattr(graph_nodes, "is_installed", lambda: False)
    assert num_other_nodes(fail) == 0
