"""Rounds of the engine with and without streaming clients.

    python -m benchmarks.streamed_rounds [--clients 64] [--tokens 60] [--runs 5]

The same requests run in turn as streams and as one request for as many samples, whose answer comes
at the end. The CPU time of the engine's process for a round is the kernel's count; it does not
depend on what else runs. The wall clock does: on few cores, the front and the clients take
turns with the engine."""

import argparse
import asyncio
import json
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.harness.report import table
from benchmarks.soak import MODEL, Server, served
from tllm_spec.bench.sse_client import Target, events, request


class Rounds(NamedTuple):
    """Medians of a run: milliseconds."""

    cpu: float
    wall: float


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def run(server: Server, clients: int, tokens: int, *, stream: bool) -> Rounds:
    target = Target(f"{server.url}/v1")
    body = {"model": MODEL, "prompt": "def f(x):", "max_tokens": tokens, "ignore_eos": True}
    engine = server.pids()["engine"]
    await request(target, "GET", "/iteration_stats")
    start = cpu_seconds(engine)
    if stream:
        await asyncio.gather(*(read(target, body | {"seed": i}) for i in range(clients)))
    else:
        await request(target, "POST", "/v1/completions", body | {"n": clients, "seed": 0})
    used = cpu_seconds(engine) - start
    rounds = json.loads(await request(target, "GET", "/iteration_stats"))
    full = [
        each["iterLatencyMS"]
        for each in rounds
        if each["inflightBatchingStats"]["numGenRequests"] == clients and each["iterLatencyMS"]
    ]
    return Rounds(1e3 * used / len(rounds), median(full))


async def read(target: Target, body: dict[str, Any]) -> None:
    async for _ in events(target, "/v1/completions", body | {"stream": True}):
        pass


async def measure(clients: int, tokens: int, runs: int) -> list[list[str]]:
    options = {"device": "cpu", "max_batch_size": clients, "enable_iter_perf_stats": True}
    found: dict[bool, list[Rounds]] = {False: [], True: []}
    with served(options | {"max_stats_len": 10_000}) as server:
        for index in range(2 * (runs + 1)):
            stream = index % 2 == 1
            each = await run(server, clients, tokens, stream=stream)
            if index >= 2:  # the first two warm up
                found[stream].append(each)
    without, streamed = (_medians(found[stream]) for stream in (False, True))
    ratios = [f"{more / less:.3f}" for more, less in zip(streamed, without, strict=True)]
    return [
        ["one answer", *(f"{each:.2f}" for each in without)],
        [f"{clients} streams", *(f"{each:.2f}" for each in streamed)],
        ["ratio", *ratios],
    ]


def _medians(runs: list[Rounds]) -> Rounds:
    return Rounds(median(each.cpu for each in runs), median(each.wall for each in runs))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    rows = asyncio.run(measure(args.clients, args.tokens, args.runs))
    header = ("clients", "engine CPU ms a round", "p50 wall ms a round")
    print("\n".join(table(header, rows)))


if __name__ == "__main__":
    main()
