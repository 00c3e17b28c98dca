"""What mpirun says about a process that it has started, before MPI is initialised, and where
`mpiexec` is."""

import os
import shutil
import sys
from pathlib import Path

# Of MPICH and Intel MPI, Open MPI, and PMIx.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def mpirun_rank() -> int:
    """This process's rank if mpirun has started it, else 0."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def mpirun_descriptors() -> tuple[int, ...]:
    """File descriptors over which a child of this process can join MPI instead of it (MPICH and
    Intel MPI; Open MPI needs none)."""
    return (int(os.environ["PMI_FD"]),) if "PMI_FD" in os.environ else ()


def find_mpiexec() -> str | None:
    """MPICH's wheel has it next to the interpreter, which need not be on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return shutil.which("mpiexec", path=path)
