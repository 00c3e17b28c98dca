"""Which kernels of captured rounds are launched with programmatic dependent launch (PDL): only
ours, which wait before they read what the previous kernel writes. A library kernel launched so
would break this for every later kernel."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.test_programmatic_launch import KERNELS, pdl_kernels
from tests.lossless.wide_zoo import write_wide
from tllm_spec.kernels.nvrtc import checked
from tllm_spec.llm import LLM

driver = pytest.importorskip("cuda.bindings.driver")


def ours() -> set[str]:
    """Kernels whose source waits for the previous kernel."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(KERNELS.rglob("*.cu"))]
    waiting = [source for source in sources if "griddepcontrol.wait" in source]
    names = {
        name
        for source in waiting
        for name in re.findall(r'extern "C".*?(\w+)\(const __grid_constant__', source, re.S)
    }
    return names | {name.split(".")[1] for name in pdl_kernels()}


def programmatic_edges(graph: int) -> Counter[str]:
    """By the name of the kernel that they lead to."""
    # Before CUDA 13 the call that reports kinds of edges had another name.
    get_edges = getattr(driver, "cuGraphGetEdges_v2", driver.cuGraphGetEdges)
    handle = driver.CUgraph(graph)
    found = get_edges(handle, get_edges(handle)[-1])
    checked(found)
    ends, kinds = found[2:4]
    programmatic = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    return Counter(
        name_of(node) for node, kind in zip(ends, kinds, strict=True) if kind.type == programmatic
    )


def name_of(node: Any) -> str:
    params = checked(driver.cuGraphKernelNodeGetParams(node))
    if int(params.func):
        found = driver.cuFuncGetName(params.func)
    else:
        found = driver.cuKernelGetName(params.kern)
    return str(checked(found).decode())


def test_kernels_that_wait_are_found_in_their_sources() -> None:
    assert {
        "small_m_gemm",
        "window_attention",
        "rms_norm_kernel",
        "attention_kernel",
        "_accept",
    } <= ours()
    assert "fill" not in ours()


@pytest.mark.gpu
def test_only_our_kernels_are_launched_with_pdl(tmp_path: Path) -> None:
    target = write_wide("zoo:llama", tmp_path / "target")
    head = write_wide("zoo:llama-eagle3", tmp_path / "head")
    config = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": str(head)}
    with LLM(str(target), max_batch_size=16, speculative_config=config) as llm:
        graphs = llm._executor.parts.runner.graphs
        assert graphs is not None
        found = Counter[str]()
        for captured in graphs.whole.captured.values():
            found += programmatic_edges(captured.graph.raw_cuda_graph())
    assert found.keys() <= ours(), found
    assert (
        found["rms_norm_kernel"] > 0 and found["window_attention"] > 0 and found["small_m_gemm"] > 0
    ), found
