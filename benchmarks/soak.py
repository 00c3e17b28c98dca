"""The server under mixed load for long: half of the clients leave, processes are killed.

    python -m benchmarks.soak [--minutes 20] [--clients 500] [--device cpu] [--config x.yaml]
    python -m benchmarks.soak --minutes 0.2 --clients 20     # shows that it runs, in a minute

Four parts, each of which must pass: memory stays flat and every slot and page is given back; a
front process is killed and replaced; `check_integrity` holds after the same load in this process;
the engine is killed, and every stream ends with an error at once. Exits with 1 if one fails."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import yaml

from benchmarks.harness.report import about, save, table
from benchmarks.harness.served import Server, served
from tllm_spec.bench.serve_load import HttpError, Target, events, get

MODEL = "zoo:llama"
OPTIONS: dict[str, Any] = {
    "max_batch_size": 16, "kv_cache_config": {"max_tokens": 16384}, "speculative_config": {
    "decoding_type": "Eagle3", "max_draft_len": 4, "speculative_model": "zoo:llama-eagle3",
    "adaptive": {"strategy": "cost_model"}, },
}  # fmt: skip
PROMPTS = ("def f(x):", "import os\n", "class A:", "for i in range(10):", "return x")
MAX_GROWTH = 1.1  # of a process' memory, from the second wave to the last
IDLE_SECONDS = 120


def body_of(random: Random) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "prompt": random.choice(PROMPTS)}
    body |= {"max_tokens": random.randint(5, 60), "temperature": random.choice([0.0, 0.8])}
    body |= {"stream": True, "ignore_eos": True}
    more = random.choice([{}, {}, {"n": 2}, {"logprobs": 2}, {"stop": ["\n"]}, {"top_p": 0.9}])
    return body | more


class Begun:
    """Counts streams that have begun. `many` is set once they are `number`."""

    def __init__(self, number: int) -> None:
        self.many = asyncio.Event()
        self._number = number

    def add(self) -> None:
        self._number -= 1
        if self._number <= 0:
            self.many.set()


async def client(target: Target, random: Random, leaves: bool, begun: Begun) -> str:
    """How the stream has ended: `whole`, `left`, `error event`, `refused` or `cut`."""
    num_events = random.randint(1, 10) if leaves else None
    stream = events(target, "/v1/completions", body_of(random))
    try:
        number, has_error = 0, False
        async for _, data in stream:
            number += 1
            if number == 1:
                begun.add()
            has_error = "error" in data
            if number == num_events:
                return "left"
        return "error event" if has_error else "whole"
    except HttpError as error:
        print(f"refused: {error}", flush=True)
        return "refused"
    except OSError:
        return "cut"
    finally:
        await stream.aclose()  # type: ignore[attr-defined]  # it is a generator


async def wave(url: str, clients: int, seed: int, begun: Begun | None = None) -> Counter[str]:
    begun = begun or Begun(clients)
    target, random = Target(f"{url}/v1"), Random(seed)
    seeds = [Random(random.random()) for _ in range(clients)]
    return Counter(
        await asyncio.gather(
            *(client(target, each, i % 2 == 1, begun) for i, each in enumerate(seeds))
        )
    )


async def wait_until_idle(url: str) -> dict[str, Any]:
    """The engine's state once nothing runs. Raises TimeoutError."""
    deadline = time.monotonic() + IDLE_SECONDS
    while time.monotonic() < deadline:
        try:
            info = json.loads(await get(Target(f"{url}/v1"), "/server_info"))
        except (OSError, HttpError):  # a front is being replaced
            await asyncio.sleep(0.2)
            continue
        state: dict[str, Any] = info["internal_states"][0]
        busy = state["num_requests_running"], state["num_requests_waiting"]
        if busy == (0, 0) and state["kv_cache"]["used"] == 0:
            return state
        await asyncio.sleep(0.2)
    raise TimeoutError("the engine does not give its slots and pages back")


def memory_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """The slope of a least-squares line through (hours, MiB)."""
    hours, sizes = zip(*samples, strict=True)
    middle, mean = fmean(hours), fmean(sizes)
    spread = sum((hour - middle) ** 2 for hour in hours)
    return sum((hour - middle) * (size - mean) for hour, size in samples) / spread


async def flat_memory(
    server: Server, clients: int, minutes: float, record: dict[str, Any]
) -> list[str]:
    """What is wrong after waves for so long, three at least. Memory counts from the second wave."""
    start, rows, seed = time.monotonic(), [], 0
    end = start + 60 * minutes
    samples: dict[str, list[tuple[float, float]]] = {"engine": [], "front": []}
    mistakes: list[str] = []
    while seed < 3 or time.monotonic() < end:
        ends = await wave(server.url, clients, seed)
        await wait_until_idle(server.url)
        memory = {name: memory_mib(pid) for name, pid in server.pids().items()}
        rows.append((seed, ends, memory))
        for name in samples if seed else ():
            samples[name].append(((time.monotonic() - start) / 3600, memory[name]))
        if lost := ends["cut"] + ends["error event"] + ends["refused"]:
            mistakes.append(f"wave {seed}: {lost} requests have failed: {dict(ends)}")
        seed += 1
    shown = rows[:: max(1, len(rows) // 10)]
    header = ["wave", "whole", "left", "engine MiB", "front MiB"]
    cells = [
        [str(n), str(e["whole"]), str(e["left"]), f"{m['engine']:.0f}", f"{m['front']:.0f}"]
        for n, e, m in shown
    ]
    print("\n".join(table(header, cells)), flush=True)
    record |= {"waves": seed, "requests": seed * clients}
    for name, found in samples.items():
        first, last, growth = found[0][1], found[-1][1], slope(found)
        record[name] = {"MiB": [first, last], "MiB/h": growth}
        print(f"{name}: {first:.0f} to {last:.0f} MiB, {growth:+.1f} MiB an hour", flush=True)
        if last > first * MAX_GROWTH:
            mistakes.append(f"the {name} grew from {first:.0f} to {last:.0f} MiB")
    return mistakes


async def half_begun(server: Server, clients: int, seed: int) -> asyncio.Task[Counter[str]]:
    """A wave, once half of its streams have begun."""
    begun = Begun(clients // 2)
    running = asyncio.create_task(wave(server.url, clients, seed, begun))
    await begun.many.wait()
    return running


async def front_killed(server: Server, clients: int) -> list[str]:
    before = server.pids()
    running = await half_begun(server, clients, 1000)
    os.kill(before["front"], signal.SIGKILL)
    ends = await running
    await wait_until_idle(server.url)
    after = await wave(server.url, clients, 1001)
    print(f"front killed: {dict(ends)}; the next wave: {dict(after)}")
    mistakes = [] if after["whole"] + after["left"] == clients else ["requests failed afterwards"]
    if server.pids()["engine"] != before["engine"]:
        mistakes.append("the engine was started again")
    return mistakes


async def engine_killed(server: Server, clients: int) -> list[str]:
    running = await half_begun(server, clients, 2000)
    start = time.monotonic()
    os.kill(server.pids()["engine"], signal.SIGKILL)
    ends = await running
    seconds = time.monotonic() - start
    status = await asyncio.to_thread(server.process.wait, 60)
    print(f"engine killed: {dict(ends)} within {seconds:.1f} s; exit status {status}")
    mistakes = [] if status else ["the exit status is 0"]
    if not ends["error event"]:
        mistakes.append("no stream has an error event")
    return mistakes


async def integrity(options: dict[str, Any], clients: int) -> list[str]:
    """The same load on an engine in this process, whose invariants are then checked."""
    from tllm_spec import LLM
    from tllm_spec.server.app import OpenAIServer
    from tllm_spec.server.http_server import HttpServer
    from tllm_spec.server.options import ServerOptions

    with LLM(MODEL, **options) as llm:
        server, stop = OpenAIServer(llm, "m"), asyncio.Event()
        listener = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(
            HttpServer(server.app(), ServerOptions()).serve(listener, stop, lambda: None)
        )
        ends = await wave(f"http://127.0.0.1:{listener.getsockname()[1]}", clients, 3000)
        await asyncio.to_thread(llm.check_integrity)
        stop.set()
        await serving
    print(f"check_integrity holds after {dict(ends)}")
    return [] if ends["whole"] + ends["left"] == clients else ["requests failed"]


async def soak(
    options: dict[str, Any], clients: int, minutes: float, record: dict[str, Any]
) -> list[str]:
    """What is wrong. Figures are added to `record`."""
    with served(MODEL, options) as server:
        mistakes = await flat_memory(server, clients, minutes, record)
        mistakes += await front_killed(server, clients)
        mistakes += await engine_killed(server, clients)
    return mistakes + await integrity(options, clients)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--config", type=Path, help="other arguments of LLM")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    given = parser.parse_args()
    options = OPTIONS if given.config is None else yaml.safe_load(given.config.read_text())
    record: dict[str, Any] = {"about": about(given.device)}
    options = options | {"device": given.device}
    mistakes = asyncio.run(soak(options, given.clients, given.minutes, record))
    if given.output is not None:
        save(given.output, record | {"mistakes": mistakes})
    print("\n".join(mistakes) or "all parts have passed")
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
