"""Each rank knows how many ranks use its device."""

from __future__ import annotations

import pytest

from tests.distributed.worlds import run_world

pytest.importorskip("mpi4py")

# Both in one world, since each of its processes imports torch.
JOIN = """
from types import SimpleNamespace

import torch
from mpi4py import MPI
from tllm_spec.distributed.process_group import ProcessGroup

torch.cuda.set_device = lambda device: None
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"GPU {device.index}")
for kind, expected in (("cpu", [3, 3, 3]), ("cuda", [2, 2, 1])):
    group = ProcessGroup(MPI.COMM_WORLD)
    group.join(torch.device(kind, group.mapping.rank // 2 if kind == "cuda" else None))
    assert group.captures == (kind == "cpu")
    assert group.gather(group.ranks_on_device) == expected, (kind, group.ranks_on_device)
    group.close()
"""


def test_ranks_that_share_a_device_are_counted_when_they_join() -> None:
    world = run_world(3, ["-c", JOIN])
    assert world.returncode == 0, world.output
