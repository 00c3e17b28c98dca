"""Collectives on CUDA devices: captured in a graph, and a model on two devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.cases import GPU_CASES
from tests.distributed.worlds import run_world

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.gpu

CAPTURE = """
import torch
from mpi4py import MPI
from tllm_spec.distributed.process_group import ProcessGroup

group = ProcessGroup(MPI.COMM_WORLD)
rank, size = group.mapping.rank, group.mapping.world_size
device = torch.device("cuda", rank % torch.cuda.device_count())
group.join(device)
values = torch.zeros(4, 8, device=device, dtype=torch.bfloat16)

def work():
    sums = values.clone()
    group.all_reduce(sums)
    return sums, group.all_gather(values)

stream = torch.cuda.Stream(device)
with torch.cuda.stream(stream):
    work()
torch.cuda.synchronize(device)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=stream):
    sums, gathered = work()
for step in range(1, 4):
    values.fill_(step * (rank + 1))
    graph.replay()
    torch.cuda.synchronize(device)
    assert (sums == step * size * (size + 1) // 2).all(), sums
    assert gathered.shape == (4, 8 * size)
    for other in range(size):
        assert (gathered[:, 8 * other : 8 * (other + 1)] == step * (other + 1)).all(), gathered
group.close()
"""


def test_collectives_of_all_devices_replay_in_a_graph() -> None:
    world = run_world(torch.cuda.device_count(), ["-c", CAPTURE])
    assert world.returncode == 0, world.output


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
def test_two_devices_emit_the_tokens_of_one(tmp_path: Path) -> None:
    """In float32: in bfloat16 sums over ranks round differently, and near ties may differ."""
    names = list(GPU_CASES)
    results = tmp_path / "results"
    module = ["-m", "tests.distributed.world", str(results), "", *names]
    world = run_world(2, module)
    assert world.returncode == 0, world.output
    found = json.loads(results.read_text())
    for name in names:
        expected = GPU_CASES[name].outputs("", 1)
        assert found[name] == json.loads(json.dumps(expected)), name
