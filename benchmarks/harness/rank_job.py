"""One rank of a job of `benchmarks.several_devices`, which starts as many of these as it has ranks:

    mpiexec -n N python -m mpi4py -m benchmarks.harness.rank_job JOB RESULTS

JOB: a `Job` in JSON. Rank 0 appends to RESULTS, in JSON, a row for each thing that it measures."""

from __future__ import annotations

import faulthandler
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.harness.device_time import idle_us
from benchmarks.harness.engine import Rounds, Trace
from benchmarks.harness.report import Row
from tllm_spec.distributed import process_group
from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.distributed.one_shot import OneShotSum
from tllm_spec.distributed.sum_choice import NCCL, SIZES, ChosenSums, Sum, graph_seconds, nccl_sum
from tllm_spec.models.moe import Router

HANGS_AFTER_S = 150
SUM_KERNELS = ("nccl", "rank_sum")  # in a kernel's name
TIMINGS = 3


@dataclass(frozen=True)
class Job:
    """`kind`: `rounds`, or `sums` alone. `model`, `draft`: config.json of a target, and of an
    EAGLE-3 head. `started`: when the processes were started, on the clock that they share.
    `sums`: `chosen` as in serving, or `NCCL` or `one-shot` for all sizes."""

    name: str
    ranks: int
    kind: str = "rounds"
    model: Mapping[str, Any] = field(default_factory=dict)
    draft: Mapping[str, Any] | None = None
    draft_len: int = 0
    rates: tuple[float, ...] = ()
    ep_size: int = 1
    sums: str = "chosen"
    device: str = "cuda"
    batch_sizes: tuple[int, ...] = (1,)
    prompt_len: int = 1024
    room: int = 512
    rounds: int = 40
    started: float = 0.0

    def options(self, folder: Path) -> dict[str, Any]:
        """`LlmArgs` of the engine, whose models are folders without weights."""
        options: dict[str, Any] = {
            "load_format": "dummy",
            "device": self.device,
            "max_num_tokens": 2048,
            "tensor_parallel_size": self.ranks,
            "moe_expert_parallel_size": self.ep_size,
            "kv_cache_config": {"enable_block_reuse": False},
            "cuda_graph_config": {"batch_sizes": list(self.batch_sizes)},
        }
        if self.device == "cpu":
            options["kv_cache_config"]["max_tokens"] = 4096
        if self.draft is not None:
            options["speculative_config"] = {
                "decoding_type": "Eagle3",
                "speculative_model": str(folder / "draft"),
                "load_format": "dummy",
                "max_draft_len": self.draft_len,
                "synthetic_acceptance_rates": self.rates,
            }
        return options


def measured(job: Job, engine: Rounds) -> Iterator[Row]:
    """Of rank 0. Traces last: a profiler makes later launches slower."""
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


def spread_experts(engine: Rounds) -> None:
    """Random correction biases would send all tokens to the same experts."""
    for module in engine.executor.parts.runner.engine.model.modules():
        if isinstance(module, Router) and module.e_score_correction_bias is not None:
            module.e_score_correction_bias.zero_()


def sums_of(trace: Trace, num_rounds: int) -> Row:
    """Collectives of a round: their number, and their time, in which a rank waits for the other."""
    kernels = [event for event in trace if event.get("cat") == "kernel"]
    sums = [event for event in kernels if any(each in event["name"] for each in SUM_KERNELS)]
    micros = sum(event["dur"] for event in sums)
    return {"sums": len(sums) / num_rounds, "sums_us": micros / num_rounds}


def sum_times(device: torch.device, communicator: Communicator) -> Iterator[Row]:
    """Microseconds of a sum of each size that is added to other values, in a CUDA graph. All ranks
    measure together."""
    one_shot = OneShotSum(max(SIZES), device, communicator)
    seconds = graph_seconds(device)
    for size in SIZES:
        yield {
            "bytes": size,
            "nccl_us": 1e6 * seconds(nccl_sum, size),
            "one_shot_us": 1e6 * seconds(one_shot, size),
        }
    one_shot.close()


def run(job: Job, communicator: Communicator) -> Iterator[Row]:
    """The rows of this rank."""
    if job.kind == "sums":
        device = torch.device("cuda", communicator.mapping.rank)
        communicator.join(device)
        yield from sum_times(device, communicator)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, config in (("target", job.model), ("draft", job.draft or {})):
            (folder / part).mkdir()
            (folder / part / "config.json").write_text(json.dumps(config))
        engine = Rounds(
            str(folder / "target"),
            max_batch_size=max(job.batch_sizes),
            max_seq_len=job.prompt_len + job.room * (1 + job.draft_len),
            communicator=communicator,
            **job.options(folder),
        )
    seconds, facts = time.monotonic() - job.started, engine.executor.parts.ranks[0]
    spread_experts(engine)
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

    def all_by(others: Mapping[str, Sum], *measured: object) -> ChosenSums:
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
