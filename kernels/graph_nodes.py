"""What a CUDA graph would hold of some work. It knows nothing of what the work computes."""

from collections.abc import Callable

import torch

from tllm_spec.kernels.nvrtc import is_installed


def num_other_nodes(work: Callable[[], object]) -> int:
    """Nodes that are no kernels, such as the memset of a counter, in a capture of the work, which must have run before.
    0 where there is no cuda-python to ask."""
    if not is_installed():
        return 0
    from cuda.bindings import runtime

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        work()
    captured = runtime.cudaGraph_t(graph.raw_cuda_graph())
    _, _, number = runtime.cudaGraphGetNodes(captured)
    _, nodes, _ = runtime.cudaGraphGetNodes(captured, number)
    types = [runtime.cudaGraphNodeGetType(node)[1] for node in nodes]
    return sum(found is not runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel for found in types)
