"""Collectives on CUDA devices: captured in a graph, a model on two devices, and two ranks that
share one device.

    python -m pytest -n 0 -m gpu tests/distributed/test_collectives_gpu.py

One device is enough; what needs two is skipped."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.distributed.cases import ALL, GPU_CASES, WIDE
from tests.distributed.test_failures import PROGRAM, end_after_kill
from tests.distributed.tiny_models import save_tiny
from tests.distributed.worlds import run_world

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.gpu

SHARED = ("gpu-eagle3", "gpu-divided-experts", "gpu-latent-mtp")
# Of `WIDE`: grammars, trees, heads and draft models, divided experts, MTP.
WITNESSES = (
    "wide-grammars-tree",
    "wide-eagle3",
    "wide-rejection",
    "wide-experts-ep2",
    "wide-latent-mtp-tree-ep2",
)
# A rank that hangs says where.
LIMITED = """
import faulthandler
faulthandler.dump_traceback_later(100, exit=True)
"""
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
group.before_close(graph.reset)
group.close()
"""

PEER_SUMS = """
import torch
from mpi4py import MPI
from tllm_spec.distributed.peer_sums import PeerSums
from tllm_spec.distributed.process_group import ProcessGroup
from tllm_spec.distributed.peer_sums import choose_sums, graph_seconds
from tllm_spec.kernels.parallel.rank_sum import rank_best_reference
from tllm_spec.kernels.parallel.rank_sum import rank_sum_reference

group = ProcessGroup(MPI.COMM_WORLD)
rank, size = group.mapping.rank, group.mapping.world_size
device = torch.device("cuda", rank % torch.cuda.device_count())
group.join(device)
sums = PeerSums(device, group)
if group.captures:
    choice = choose_sums(sums.ways, graph_seconds(device), group.share)
# Of sums that follow each other: bytes in bfloat16 are 8 KiB, 2 MiB, 600, 64 KiB, 512 KiB, 20 KiB.
shapes = [(1, 4096), (256, 4096), (3, 100), (8, 4096), (64, 4096), (2, 5120)]
# Of 300 rows: float32 values, and columns in the order of the ranks.
chosen = torch.randn(300, size, generator=torch.Generator().manual_seed(1))
columns = torch.arange(size, dtype=torch.int32).expand(300, -1)
offers = torch.stack((chosen.view(torch.int32), columns), 2)
own_offers = offers[:, rank].contiguous().to(device)
for dtype in (torch.float32, torch.bfloat16):
    parts = [
        [torch.randn(*shape, generator=torch.Generator().manual_seed(100 * n + r)).to(dtype)
         for r in range(size)]
        for n, shape in enumerate(shapes)
    ]
    values = [each[rank].to(device) for each in parts]
    pairs = [(way, n) for n, each in enumerate(values) for way in sums.ways.values()
             if way.serves(each)]
    assert len(pairs) == 2 * len(shapes) - 1 and not pairs[0][0].serves(values[0][:, 1::2])

    def work():
        totals = [torch.ones_like(values[n]) for _, n in pairs]
        for total, (way, n) in zip(totals, pairs):
            way(values[n].clone(), total)
        last = [values[-1].clone() for _ in sums.ways]
        for way, each in zip(sums.ways.values(), last):
            way(each)
        return totals, last, sums.best_offers(own_offers)

    def check(totals, last, best):
        torch.cuda.synchronize(device)
        for total, (_, n) in zip(totals, pairs):
            expected = rank_sum_reference(parts[n], torch.ones_like(parts[n][0]))
            assert torch.equal(total.cpu(), expected), (dtype, parts[n][0].shape)
        assert all(torch.equal(each.cpu(), rank_sum_reference(parts[-1])) for each in last), dtype
        assert torch.equal(best.cpu(), rank_best_reference(offers))

    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        check(*work())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = work()
    for _ in range(50 if group.captures else 3):
        graph.replay()
    check(*found)
    check(*work())  # eager sums go on counting where replays have stopped
    graph.reset()
sums.close()
print("equal", flush=True)
group.close()
"""
STAGED = """
import torch
from mpi4py import MPI
from tllm_spec.distributed.process_group import ProcessGroup

group = ProcessGroup(MPI.COMM_WORLD)
rank, device = group.mapping.rank, torch.device("cuda", 0)
group.join(device)
assert not group.captures and group.ranks_on_device == 2
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    values = torch.full((3, 4), rank + 1, device=device, dtype=dtype)
    gathered = group.all_gather(values)
    assert gathered.is_cuda and gathered.tolist() == [[1] * 4 + [2] * 4] * 3, gathered
    group.all_reduce(values)
    assert values.is_cuda and (values == 3).all(), values
group.close()
"""


def first_device() -> str:
    """For CUDA_VISIBLE_DEVICES."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def check(num_ranks: int, names: Sequence[str], folder: Path, **variables: str) -> None:
    """The cases emit the tokens of one rank, in float32: in bfloat16 sums over ranks round
    differently, and near ties may differ. One world runs all of them: to start it takes longer."""
    for model in {ALL[name].model for name in names} | {"eight-heads", "eagle3-eight-heads"}:
        if not model.startswith("zoo:"):
            save_tiny(folder, model)
    results = folder / "results"
    module = ["-m", "tests.distributed.world", str(results), str(folder), *names]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_world, num_ranks, module, **variables)
        expected = {name: ALL[name].outputs(str(folder), 1) for name in names}
        world = running.result()
    assert world.returncode == 0, world.output
    found = json.loads(results.read_text())
    for name in names:
        assert found[name] == json.loads(json.dumps(expected[name])), name


def test_collectives_of_all_devices_replay_in_a_graph() -> None:
    world = run_world(torch.cuda.device_count(), ["-c", LIMITED + CAPTURE])
    assert world.returncode == 0, world.output


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
def test_a_killed_rank_ends_the_ranks_of_all_devices(tmp_path: Path) -> None:
    save_tiny(tmp_path, "eight-heads")
    ranks = str(torch.cuda.device_count())
    command = [sys.executable, *PROGRAM, str(tmp_path / "eight-heads"), "none", "cuda", ranks]
    status, output = end_after_kill(command, 1)
    assert status > 0 and "error rank 1 (process" in output, output


def test_collectives_of_one_rank_over_nccl_replay_in_a_graph() -> None:
    world = run_world(1, ["-c", LIMITED + CAPTURE], CUDA_VISIBLE_DEVICES=first_device())
    assert world.returncode == 0, world.output


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
def test_two_devices_emit_the_tokens_of_one(tmp_path: Path) -> None:
    check(2, list(GPU_CASES), tmp_path)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="four CUDA devices are needed")
def test_all_devices_emit_the_tokens_of_one(tmp_path: Path) -> None:
    check(torch.cuda.device_count(), WITNESSES, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="four CUDA devices are needed")
def test_all_devices_emit_the_tokens_of_one_in_the_other_cases(tmp_path: Path) -> None:
    check(torch.cuda.device_count(), sorted(set(WIDE) - set(WITNESSES)), tmp_path)


def test_two_ranks_on_one_device_emit_the_tokens_of_one_rank(tmp_path: Path) -> None:
    """Their sums go over the host, by gloo, which is slow."""
    check(2, SHARED, tmp_path, CUDA_VISIBLE_DEVICES=first_device())


def test_staged_collectives_of_ranks_on_one_device_are_exact() -> None:
    world = run_world(2, ["-c", LIMITED + STAGED], CUDA_VISIBLE_DEVICES=first_device())
    assert world.returncode == 0, world.output


def test_sums_over_peer_memory_replay_in_a_graph() -> None:
    """On all devices; of one device two ranks have turns."""
    world = run_world(max(torch.cuda.device_count(), 2), ["-c", LIMITED + PEER_SUMS])
    assert world.returncode == 0 and "equal" in world.output, world.output
