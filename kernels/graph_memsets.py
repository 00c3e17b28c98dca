"""Replaces small memset nodes of a captured CUDA graph by kernel nodes.

A graph that has only kernels is cheap for the host to launch. One that also has memsets costs many
times as much. cuBLASLt clears a counter before every split-K GEMM.

Needs cuda-python, and a graph that is not instantiated yet."""

import ctypes
import functools
from typing import Any

import torch

from tllm_spec.kernels.nvrtc import Kernel, checked, compile_source

MAX_ELEMENTS = 4096  # larger memsets stay: the kernel has one CTA
THREADS = 256
_ARGUMENT_TYPES = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_uint, ctypes.c_uint)


def memsets_as_kernels(graph: int) -> int:
    """Replaces every small memset by a kernel with the same effect and the same dependencies.

    Args:
        graph: `CUDAGraph.raw_cuda_graph()`.

    Returns:
        The number of replaced nodes.
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
    """False if the node stays a memset."""
    from cuda.bindings import driver

    wanted = checked(driver.cuGraphMemsetNodeGetParams(node))
    if wanted.height != 1 or wanted.width > MAX_ELEMENTS:
        return False
    before = _listed(driver.cuGraphNodeGetDependencies, node)
    after = _listed(driver.cuGraphNodeGetDependentNodes, node)
    values = (int(wanted.dst), wanted.width, wanted.value, wanted.elementSize)
    params = _fill(torch.cuda.current_device()).node_params(THREADS, values, _ARGUMENT_TYPES)
    kernel = checked(driver.cuGraphAddKernelNode(graph, before, len(before), params))
    checked(driver.cuGraphDestroyNode(node))
    # Before CUDA 13 the call that takes kinds of edges had another name; without kinds both are the
    # same.
    connect = getattr(driver, "cuGraphAddDependencies_v2", driver.cuGraphAddDependencies)
    checked(connect(graph, [kernel] * len(after), after, None, len(after)))
    return True


def _listed(call: Any, handle: Any) -> list[Any]:
    """All items of a driver call that reports their number if called without one."""
    found = call(handle)
    checked(found)
    return list(checked(call(handle, found[-1]))) if found[-1] else []


@functools.cache
def _fill(device: int) -> Kernel:
    """The kernel, loaded into the current context, which is the device's."""
    major, minor = torch.cuda.get_device_capability(device)
    return Kernel(compile_source("fill.cu", f"sm_{major}{minor}"), "fill", 0)
