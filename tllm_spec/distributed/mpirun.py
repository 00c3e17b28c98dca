"""What mpirun says about a process that it has started, before MPI is initialised, what it has
bound the process to, and where `mpiexec` is."""

import importlib.util
import logging
import os
import shutil
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

# MPICH and Intel MPI, Open MPI, and PMIx set these.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")  # of MPICH and Intel MPI, Open MPI
# Set in ranks that Open MPI 4's mpirun has bound, and in all that Open MPI 5's has started.
BOUND_BY_4, STARTED_BY_5 = "OMPI_MCA_orte_bound_at_launch", "PRTE_LAUNCHED"
# Prefixes of variables that exist if the binding was asked for: by --bind-to, --cpu-set,
# --cpu-list, --cpus-per-rank or --rankfile; the last is Open MPI 5's, which the user sets.
ASKED_FOR = (
    "OMPI_MCA_hwloc_base_bind",
    "OMPI_MCA_hwloc_base_cpu_",
    "OMPI_MCA_rmaps_base_cpus_per_",
    "OMPI_MCA_orte_rankfile",
    "PRTE_MCA_hwloc_default_binding_policy",
)
MAPPING = "OMPI_MCA_rmaps_base_mapping_policy"  # --map-by; with PE=n it asks for n processors
MAX_CPUS = 1 << 13  # of Linux
BOUND = (
    "mpirun has bound this rank to CPUs %s of %d, and all that the rank does runs on these: "
    "unless it is wanted, start it with mpirun --bind-to none"
)


def mpirun_rank() -> int:
    """This process's rank if mpirun has started it, else 0."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def mpirun_size() -> int:
    """How many processes mpirun has started, 1 without it."""
    return next((int(os.environ[name]) for name in SIZE_VARIABLES if name in os.environ), 1)


def end_mpirun() -> None:
    """Ends all of mpirun's processes from one that has failed before it joined MPI, for which the
    others would wait for ever. Without mpirun or mpi4py nothing happens."""
    if mpirun_size() > 1 and importlib.util.find_spec("mpi4py") is not None:
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)


def mpirun_descriptors() -> tuple[int, ...]:
    """File descriptors over which a child of this process can join MPI instead of it (MPICH and
    Intel MPI; Open MPI needs none)."""
    return (int(os.environ["PMI_FD"]),) if "PMI_FD" in os.environ else ()


def undo_default_binding() -> None:
    """Open MPI binds each rank to one core if it is not told otherwise. Such a rank may use all
    CPUs of its container again; a binding that was asked for stays. Open MPI 5 does not say which
    of both it is, so rank 0 warns. To be called before threads are started, which keep the binding.
    """
    if sys.platform != "linux" or any(name.startswith(ASKED_FOR) for name in os.environ):
        return
    if BOUND_BY_4 in os.environ and "PE=" not in os.environ.get(MAPPING, "").upper():
        os.sched_setaffinity(0, range(MAX_CPUS))  # Linux leaves out those of other containers
    elif STARTED_BY_5 in os.environ and mpirun_rank() == 0:
        own, of_mpirun = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
        if own < of_mpirun:
            logger.warning(BOUND, sorted(own), len(of_mpirun))


def find_mpiexec() -> str | None:
    """MPICH's wheel has it next to the interpreter, which need not be on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return shutil.which("mpiexec", path=path)
