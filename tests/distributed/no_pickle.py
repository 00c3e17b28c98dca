"""Makes pickled messages between ranks an error in this process."""

from __future__ import annotations

from typing import NoReturn


class PickleUsedError(Exception):
    """A message between ranks was pickled."""


def forbid_pickle() -> None:
    """For the methods of mpi4py and of torch.distributed that take Python objects."""
    from mpi4py import MPI
    from torch.distributed import distributed_c10d

    MPI.pickle.__init__(_refuse, _refuse)  # type: ignore[misc] # as mpi4py documents it
    distributed_c10d._pickler = distributed_c10d._unpickler = _refuse


def _refuse(*values: object, **options: object) -> NoReturn:
    raise PickleUsedError
