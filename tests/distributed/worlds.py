"""Starts programs under mpirun and watches how they end."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tllm_spec.distributed.mpirun import find_mpiexec

SECONDS = 300  # a world that hangs fails its test
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class World:
    returncode: int
    output: str  # of all ranks, both streams


def mpirun(num_ranks: int, arguments: list[str]) -> list[str]:
    found = find_mpiexec()
    assert found is not None, "mpi4py is installed without an mpiexec"
    # mpi4py's runner ends all ranks after an exception of one.
    return [found, "-n", str(num_ranks), sys.executable, "-m", "mpi4py", *arguments]


# Of Open MPI 4 and 5. They refuse root, which containers run as, unless told twice, and more ranks
# than cores.
OPEN_MPI = {
    **{
        f"{prefix}_ALLOW_RUN_AS_ROOT{twice}": "1"
        for prefix in ("OMPI", "PRTE")
        for twice in ("", "_CONFIRM")
    },
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def environment() -> dict[str, str]:
    """One thread for each rank: the ranks share the machine's cores."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **OPEN_MPI, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def run_world(num_ranks: int, arguments: list[str], **variables: str) -> World:
    return run(mpirun(num_ranks, arguments), **variables)


def start(command: list[str]) -> subprocess.Popen[str]:
    """As `run`, without waiting."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,
    )


def run(command: list[str], **variables: str) -> World:
    """In a session of its own: mpirun signals its process group when a rank dies. `variables`: of
    the environment."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        env=environment() | variables,
        start_new_session=True,
        check=False,
    )
    return World(done.returncode, done.stdout)
