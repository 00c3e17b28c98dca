"""What mpirun starts in tests, once for each rank: runs the cases one after another.

    mpirun -n N python -m tests.distributed.world RESULTS MODEL_FOLDER NAME...

A name is that of a case or in EXCHANGES. Rank 0 writes to RESULTS, as JSON, what each gives. No
rank may use pickle."""

from __future__ import annotations

import faulthandler
import json
import sys
from contextlib import suppress
from pathlib import Path

from tests.distributed.cases import ALL
from tests.distributed.exchanges import gathered_bytes, ranks_on_devices
from tests.distributed.no_pickle import PickleUsedError, forbid_pickle
from tests.distributed.worlds import SECONDS

EXCHANGES = {"gathered_bytes": gathered_bytes, "ranks_on_devices": ranks_on_devices}


def main() -> None:
    from mpi4py import MPI

    results, folder, *names = sys.argv[1:]
    faulthandler.dump_traceback_later(SECONDS - 20, exit=True)  # a rank that hangs says where
    forbid_pickle()
    with suppress(PickleUsedError):
        MPI.COMM_SELF.bcast(names)
        raise AssertionError("mpi4py's bcast must fail here")
    runs = {name: case.outputs for name, case in ALL.items()} | EXCHANGES
    found = {}
    for name in names:
        print(f"rank {MPI.COMM_WORLD.rank}: {name}", flush=True)
        try:
            found[name] = runs[name](folder, MPI.COMM_WORLD.size)
        except SystemExit as end:  # another rank than the first, after rank 0's end
            if end.code:
                raise
    if MPI.COMM_WORLD.rank == 0:
        Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
