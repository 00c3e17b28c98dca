"""Small memset nodes of a captured CUDA graph as kernel nodes.

A graph of nothing but kernels is cheap to launch however many they are; one with memsets among them
costs the host many times as much. cuBLASLt clears a counter before every product whose sums it
splits.

It knows nodes and edges, not what they are for. It needs cuda-python, and a graph that is not
instantiated yet."""

import ctypes
import functools
from typing import Any

import torch

from tllm_spec.kernels.nvrtc import Kernel, checked, compile_source

MAX_ELEMENTS = 4096  # more stay memsets: the kernel has one CTA
THREADS = 256
_ARGUMENT_TYPES = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_uint, ctypes.c_uint)


def memsets_as_kernels(graph: int) -> int:
    """Puts a kernel in the place of every small memset: between the same nodes, with the same
    effect.

    Args:
        graph: `CUDAGraph.raw_cuda_graph()`.

    Returns:
        how many were replaced.
    """
    from cuda.bindings import driver

    handle = driver.CUgraph(graph)
    memset = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
    nodes = _listed(driver.cuGraphGetNodes, handle)
    return sum(
        _replace(handle, node)
        for node in nodes
        if checked(driver.cuGraphNodeGetType(node)) == memset
    )


def _replace(graph: Any, node: Any) -> bool:
    """False where it stays."""
    from cuda.bindings import driver

    wanted = checked(driver.cuGraphMemsetNodeGetParams(node))
    if wanted.height != 1 or wanted.width > MAX_ELEMENTS:
        return False
    before = _listed(driver.cuGraphNodeGetDependencies, node)
    behind = _listed(driver.cuGraphNodeGetDependentNodes, node)
    values = (int(wanted.dst), wanted.width, wanted.value, wanted.elementSize)
    params = _fill(torch.cuda.current_device()).node_params(THREADS, values, _ARGUMENT_TYPES)
    kernel = checked(driver.cuGraphAddKernelNode(graph, before, len(before), params))
    checked(driver.cuGraphDestroyNode(node))
    # Before CUDA 13 the call that knows of edges' kinds had another name; without kinds both are
    # alike.
    connect = getattr(driver, "cuGraphAddDependencies_v2", driver.cuGraphAddDependencies)
    checked(connect(graph, [kernel] * len(behind), behind, None, len(behind)))
    return True


def _listed(call: Any, handle: Any) -> list[Any]:
    """What a call lists that has to be told how much there is, which it says itself."""
    found = call(handle)
    checked(found)
    return list(checked(call(handle, found[-1]))) if found[-1] else []


@functools.cache
def _fill(device: int) -> Kernel:
    """In that device's context, which is current."""
    major, minor = torch.cuda.get_device_capability(device)
    return Kernel(compile_source("fill.cu", f"sm_{major}{minor}"), "fill", 0)
