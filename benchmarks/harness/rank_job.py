"""One rank of a job of `benchmarks.several_devices`, which starts as many of these as it has ranks:

    mpiexec -n N python -m mpi4py -m benchmarks.harness.rank_job JOB RESULTS

JOB: a `Job` in JSON. Rank 0 appends to RESULTS, in JSON, a row for each thing that it measures."""

from __future__ import annotations

import faulthandler
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.harness.device_time import idle_us
from benchmarks.harness.dummy_models import dummy_engine
from benchmarks.harness.engine import Rounds, Trace
from benchmarks.harness.expert_rounds import SPREAD, set_bias
from benchmarks.harness.models import RATES
from benchmarks.harness.report import Row
from tllm_spec.distributed import process_group
from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.distributed.peer_sums import (
    NCCL,
    SIZES,
    ChosenSums,
    PeerSum,
    PeerSums,
    graph_seconds,
    nccl_sum,
)

HANGS_AFTER_S = 150
SUM_KERNELS = ("nccl", "rank_sum", "two_shot_sum", "rank_best")  # in a kernel's name
TIMINGS = 3


@dataclass(frozen=True)
class Job:
    """`kind`: `rounds`, or `sums` alone. `model`, `draft`: config.json of a target, and of an
    EAGLE-3 head; without a head, drafts are those of the target's MTP module. `started`: when the
    processes were started, on the clock that they share. `sums`: `chosen` as in serving, or `NCCL`
    or `one-shot` for all sizes."""

    name: str
    ranks: int
    kind: str = "rounds"
    model: Mapping[str, Any] = field(default_factory=dict)
    draft: Mapping[str, Any] | None = None
    draft_len: int = 0
    ep_size: int = 1
    sums: str = "chosen"
    device: str = "cuda"
    batch_sizes: tuple[int, ...] = (1,)
    prompt_len: int = 1024
    room: int = 512
    rounds: int = 40
    started: float = 0.0


def measured(job: Job, engine: Rounds) -> Iterator[Row]:
    """The rows of rank 0. Traces last: a profiler makes later launches slower."""
    for batch_size in job.batch_sizes:
        engine.start(batch_size, job.prompt_len)
        timings = [engine.timed(job.rounds) for _ in range(TIMINGS)]
        row = {"batch": batch_size, "ms": statistics.median(each.round_ms for each in timings)}
        host = engine.host_time(job.rounds)
        yield row | {"context": timings[1].context, "host_ms": host.median}
    if engine.has_graphs:
        for batch_size in job.batch_sizes:
            engine.start(batch_size, job.prompt_len)
            trace = engine.traced(job.rounds)
            row = {"batch": batch_size, "idle_us": idle_us(trace, job.rounds)}
            yield row | sums_of(trace, job.rounds)


def sums_of(trace: Trace, num_rounds: int) -> Row:
    """Collectives of a round: their number, and their time, in which a rank waits for the other."""
    kernels = [event for event in trace if event.get("cat") == "kernel"]
    sums = [event for event in kernels if any(each in event["name"] for each in SUM_KERNELS)]
    micros = sum(event["dur"] for event in sums)
    return {"sums": len(sums) / num_rounds, "sums_us": micros / num_rounds}


def sum_times(device: torch.device, communicator: Communicator) -> Iterator[Row]:
    """Microseconds of a sum of each size that is added to other values, in a CUDA graph. All ranks
    measure together."""
    peer_sums, seconds = PeerSums(device, communicator), graph_seconds(device)
    for size in SIZES:
        row = {"bytes": size, "nccl_us": 1e6 * seconds(nccl_sum, size)}
        for name, way in peer_sums.ways.items():
            if size <= way.max_bytes:
                row[f"{name.replace('-', '_')}_us"] = 1e6 * seconds(way, size)
        yield row
    peer_sums.close()


def speculation_of(job: Job) -> dict[str, Any] | None:
    """Drafts of the EAGLE-3 head, or without one of the target's MTP module."""
    if not job.draft_len:
        return None
    of_mtp = {"decoding_type": "MTP", "synthetic_acceptance_rates": RATES[: job.draft_len]}
    return {"max_draft_len": job.draft_len} | ({} if job.draft else of_mtp)


def run(job: Job, communicator: Communicator) -> Iterator[Row]:
    """The rows of this rank."""
    if job.kind == "sums":
        device = torch.device("cuda", communicator.mapping.rank)
        communicator.join(device)
        yield from sum_times(device, communicator)
        return
    engine = dummy_engine(
        job.model,
        batch_sizes=job.batch_sizes,
        prompt_len=job.prompt_len,
        room=job.room,
        device=job.device,
        speculation=speculation_of(job),
        head=job.draft,
        communicator=communicator,
        max_num_tokens=2048,
        tensor_parallel_size=job.ranks,
        moe_expert_parallel_size=job.ep_size,
    )
    seconds, facts = time.monotonic() - job.started, engine.executor.parts.ranks[0]
    if "n_routed_experts" in job.model:
        set_bias(engine, SPREAD)  # random ones would send all tokens to the same experts
    if communicator.mapping.rank:
        engine.follow()
        return
    yield {"start_up_s": seconds, "weight_gib": facts["weight_bytes"] / 2**30}
    yield from measured(job, engine)
    engine.stop()
    engine.end()


@contextmanager
def summed_by(way: str) -> Iterator[None]:
    """Inside, the ranks do not choose how small tensors are summed."""
    ways = {"NCCL": NCCL, "one-shot": "one-shot"}

    def all_by(others: Mapping[str, PeerSum], *measured: object) -> ChosenSums:
        return ChosenSums(others, [ways[way]] * len(SIZES))

    with ExitStack() as stack:
        if way in ways:
            stack.enter_context(mock.patch.object(process_group, "choose_sums", all_by))
        yield


def main() -> None:
    text, results = sys.argv[1:]
    job = Job(**json.loads(text))
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    communicator = SINGLE
    if job.ranks > 1:
        from mpi4py import MPI

        communicator = process_group.ProcessGroup(MPI.COMM_WORLD, ep_size=job.ep_size)
    rank = communicator.mapping.rank
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    with summed_by(job.sums):
        for row in run(job, communicator):
            if rank == 0:
                with Path(results).open("a", encoding="utf-8") as file:
                    print(json.dumps({"job": job.name, "ranks": job.ranks} | row), file=file)
    communicator.close()


if __name__ == "__main__":
    main()
