"""Each rank knows how many ranks use its device."""

from __future__ import annotations

import pytest

from tests.distributed.worlds import run_world

pytest.importorskip("mpi4py")

JOIN = """
from types import SimpleNamespace

import torch
from mpi4py import MPI
from tllm_spec.distributed.process_group import ProcessGroup

group = ProcessGroup(MPI.COMM_WORLD)
rank, kind = group.mapping.rank, {kind!r}
torch.cuda.set_device = lambda device: None
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"GPU {{device.index}}")
group.join(torch.device(kind, rank // 2 if kind == "cuda" else None))
assert group.captures == (kind == "cpu")
assert group.gather(group.ranks_on_device) == {expected}, group.ranks_on_device
group.close()
"""


@pytest.mark.parametrize(("kind", "expected"), [("cpu", [3, 3, 3]), ("cuda", [2, 2, 1])])
def test_ranks_that_share_a_device_are_counted_when_they_join(
    kind: str, expected: list[int]
) -> None:
    world = run_world(3, ["-c", JOIN.format(kind=kind, expected=expected)])
    assert world.returncode == 0, world.output
