"""Memset nodes become kernel nodes with the same dependencies and the same effect."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tllm_spec.executor.graphs.slot_graphs import GraphPool
from tllm_spec.kernels import graph_memsets, nvrtc
from tllm_spec.kernels.graph_memsets import MAX_ELEMENTS, memsets_as_kernels

pytest.importorskip("cuda.bindings")

from cuda.bindings import driver

MEMSET, KERNEL = "memset", "kernel"
SUCCESS = driver.CUresult.CUDA_SUCCESS


class Graph:
    """A fake of the driver's graph: numbered nodes, and edges between them."""

    def __init__(self, kinds: dict[int, str], edges: set[tuple[int, int]], **memset: int) -> None:
        self.kinds, self.edges = dict(kinds), set(edges)
        self.memset = SimpleNamespace(
            **{"dst": 4096, "width": 2, "height": 1, "value": 7, "elementSize": 4} | memset
        )
        self.arguments: dict[int, Any] = {}

    def listed(self, found: list[int], number: int) -> tuple[Any, ...]:
        return SUCCESS, found[:number], len(found)

    def nodes(self, graph: Any, number: int = 0) -> tuple[Any, ...]:
        return self.listed(sorted(self.kinds), number)

    def before(self, node: int, number: int = 0) -> tuple[Any, ...]:
        return self.listed(sorted(a for a, b in self.edges if b == node), number)

    def after(self, node: int, number: int = 0) -> tuple[Any, ...]:
        return self.listed(sorted(b for a, b in self.edges if a == node), number)

    def kind(self, node: int) -> tuple[Any, ...]:
        types = driver.CUgraphNodeType
        is_memset = self.kinds[node] == MEMSET
        return (
            SUCCESS,
            types.CU_GRAPH_NODE_TYPE_MEMSET if is_memset else types.CU_GRAPH_NODE_TYPE_KERNEL,
        )

    def add(self, graph: Any, before: list[int], number: int, arguments: Any) -> tuple[Any, ...]:
        node = max(self.kinds) + 1
        self.kinds[node], self.arguments[node] = KERNEL, arguments
        self.edges |= {(other, node) for other in before[:number]}
        return SUCCESS, node

    def destroy(self, node: int) -> tuple[Any, ...]:
        del self.kinds[node]
        self.edges = {edge for edge in self.edges if node not in edge}
        return (SUCCESS,)

    def connect(
        self, graph: Any, first: list[int], second: list[int], kinds: None, number: int
    ) -> tuple[Any, ...]:
        self.edges |= set(zip(first[:number], second[:number], strict=True))
        return (SUCCESS,)


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `memsets_as_kernels` on a fake graph."""

    def run(graph: Graph) -> int:
        calls = {
            "cuGraphGetNodes": graph.nodes,
            "cuGraphNodeGetDependencies": graph.before,
            "cuGraphNodeGetDependentNodes": graph.after,
            "cuGraphNodeGetType": graph.kind,
            "cuGraphMemsetNodeGetParams": lambda node: (SUCCESS, graph.memset),
            "cuGraphAddKernelNode": graph.add,
            "cuGraphDestroyNode": graph.destroy,
            "cuGraphAddDependencies": graph.connect,
        }
        for name, call in calls.items():
            monkeypatch.setattr(driver, name, call)
        monkeypatch.delattr(driver, "cuGraphAddDependencies_v2", raising=False)
        kernel = SimpleNamespace(node_params=lambda threads, values, types: values)
        monkeypatch.setattr(graph_memsets, "_fill", lambda device: kernel)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        return memsets_as_kernels(0)

    return run


def test_a_kernel_node_gets_the_dependencies_of_the_memset_that_it_replaces(replace: Any) -> None:
    kinds = {0: KERNEL, 1: KERNEL, 2: MEMSET, 3: KERNEL, 4: KERNEL, 5: MEMSET}
    graph = Graph(kinds, {(0, 2), (1, 2), (2, 3), (2, 4), (3, 4), (4, 5)})
    assert replace(graph) == 2
    assert set(graph.kinds.values()) == {KERNEL} and sorted(graph.kinds) == [0, 1, 3, 4, 6, 7]
    assert graph.edges == {(0, 6), (1, 6), (6, 3), (6, 4), (3, 4), (4, 7)}
    assert graph.arguments == {6: (4096, 2, 7, 4), 7: (4096, 2, 7, 4)}


def test_two_memsets_in_sequence_become_two_kernels_in_sequence(replace: Any) -> None:
    graph = Graph({0: MEMSET, 1: MEMSET}, {(0, 1)})
    assert replace(graph) == 2 and graph.edges == {(2, 3)}


@pytest.mark.parametrize("memset", [{"height": 2}, {"width": MAX_ELEMENTS + 1}])
def test_large_and_two_dimensional_memsets_stay(replace: Any, memset: dict[str, int]) -> None:
    graph = Graph({0: KERNEL, 1: MEMSET}, {(0, 1)}, **memset)
    assert replace(graph) == 0 and graph.kinds[1] == MEMSET and graph.edges == {(0, 1)}


def test_a_graph_without_nodes_stays_empty(replace: Any) -> None:
    assert replace(Graph({}, set())) == 0


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_the_source_compiles(architecture: str) -> None:
    assert nvrtc.compile_source("fill.cu", architecture).startswith(b"\x7fELF")


def node_kinds(graph: int) -> Counter[str]:
    handle = driver.CUgraph(graph)
    nodes = graph_memsets._listed(driver.cuGraphGetNodes, handle)
    return Counter(nvrtc.checked(driver.cuGraphNodeGetType(node)).name for node in nodes)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 3, 257, MAX_ELEMENTS, MAX_ELEMENTS + 1])
@pytest.mark.parametrize(
    ("dtype", "memset"),
    [
        (torch.uint8, driver.cuMemsetD8Async),
        (torch.int16, driver.cuMemsetD16Async),
        (torch.int32, driver.cuMemsetD32Async),
    ],
)
def test_replays_have_the_effect_of_the_captured_memsets(
    size: int, dtype: torch.dtype, memset: Any
) -> None:
    values = torch.ones(size + 2, dtype=dtype, device="cuda")
    total = torch.zeros(1, dtype=torch.int64, device="cuda")

    def set_inner(value: int) -> None:
        nvrtc.checked(
            memset(values[1:].data_ptr(), value, size, torch.cuda.current_stream().cuda_stream)
        )

    def work() -> None:
        set_inner(0)
        total.add_(values.sum())  # of the two ends
        set_inner(5)

    captured = GraphPool(torch.device("cuda")).capture(work)
    total.zero_()
    for _ in range(3):
        captured.graph.replay()
    assert total.item() == 6 and values.tolist() == [1, *[5] * size, 1]
    kinds = node_kinds(captured.graph.raw_cuda_graph())
    assert kinds["CU_GRAPH_NODE_TYPE_MEMSET"] == (0 if size <= MAX_ELEMENTS else 2)
    assert kinds["CU_GRAPH_NODE_TYPE_KERNEL"] >= 2
