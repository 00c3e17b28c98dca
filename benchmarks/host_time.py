"""How long Python takes between two launches: the whole request loop in front of a device that
answers at once.

    python benchmarks/host_time.py [--output result.json] [--rounds 400]

Requests generate with overlap, plain and with three drafts made in the forward (accepted as in
`h200.py`), unread and streamed to handles. `step` is measured without any stopwatch inside; the
parts in rounds of their own. What a CUDA device adds (launching the graph, pinned copies, events)
is not in here: `h200.py` measures that."""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from driven_rounds import stopwatch
from scripted_rounds import ScriptedEngine

from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.response import Response
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import SamplingParams

BATCH_SIZES = (8, 64)
RATES = {"plain": (), "one-model K=3": (0.73, 0.52, 0.35)}
PROMPT_LEN = 1024
WARM_UP_ROUNDS = 50
BAR_US = 300.0  # of a step at the largest batch


@dataclass
class Row:
    """Microseconds a round; `parts` are medians."""

    way: str
    batch_size: int
    streaming: bool
    median_us: float
    p99_us: float
    parts: dict[str, float]

    @property
    def meets_bar(self) -> bool:
        return self.streaming or self.median_us <= BAR_US


class Readers:
    """Handles that nobody reads between two rounds; their queues are emptied by `read`."""

    def __init__(self) -> None:
        self.handles: dict[int, RequestHandle] = {}

    def add(self, requests: list[LlmRequest]) -> None:
        params = SamplingParams(detokenize=False)
        for request in requests:
            handle = RequestHandle(request.request_id, None, [], params, None, lambda: None)
            self.handles[request.request_id] = handle

    def respond(self, responses: list[Response]) -> None:
        for response in responses:
            self.handles[response.request_id].receive(response)

    def read(self) -> None:
        for handle in self.handles.values():
            handle._arrived.clear()


def measure(way: str, batch_size: int, streaming: bool, num_rounds: int) -> Row:
    rates = RATES[way]
    max_tokens = (1 + len(rates)) * (2 * num_rounds + WARM_UP_ROUNDS + 10)
    readers = Readers()
    engine = ScriptedEngine(
        batch_size, rates, respond=readers.respond, max_len=PROMPT_LEN + max_tokens
    )
    requests = engine.put(batch_size, PROMPT_LEN, max_tokens, streaming=streaming)
    readers.add(requests)
    seconds(engine, readers, WARM_UP_ROUNDS)
    steps = sorted(seconds(engine, readers, num_rounds))
    parts = median_parts(engine, readers, num_rounds)
    assert not any(request.is_finished for request in requests), (
        "rounds of fewer requests were measured"
    )
    engine.executor.check_integrity()
    p99 = steps[int(0.99 * (len(steps) - 1))]
    return Row(way, batch_size, streaming, statistics.median(steps) * 1e6, p99 * 1e6, parts)


def seconds(engine: ScriptedEngine, readers: Readers, num_rounds: int) -> list[float]:
    step, found = engine.executor.step, []
    gc.collect()
    for _ in range(num_rounds):
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
        readers.read()
    return found


def median_parts(engine: ScriptedEngine, readers: Readers, num_rounds: int) -> dict[str, float]:
    executor, parts = engine.executor, engine.parts
    places = {
        "placeholders": (executor, "_prepare_draft_requests"),
        "schedule": (executor, "_schedule"),
        "prepare_resources": (parts.kv, "prepare_resources"),
        "drafter": (parts.drafter, "prepare_draft_tokens"),
        "launch": (parts.runner, "launch"),
        "advance": (executor, "_advance"),
        "update_requests": (executor, "_update_requests"),
        "update_resources": (parts.kv, "update_resources"),
        "respond": (executor, "_finish_round"),
    }
    with ExitStack() as stack:
        found = {name: stack.enter_context(stopwatch(*place)) for name, place in places.items()}
        seconds(engine, readers, num_rounds)
    return {name: statistics.median(times) * 1e6 for name, times in found.items()}


def format_row(row: Row) -> str:
    stream = "streamed" if row.streaming else "unread"
    parts = "  ".join(f"{name} {value:.0f}" for name, value in row.parts.items())
    verdict = "ok  " if row.meets_bar else "MISS"
    return (
        f"{verdict} {row.way:<13} x{row.batch_size:<3} {stream:<8} "
        f"{row.median_us:6.0f} us, p99 {row.p99_us:6.0f}: {parts}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="where the rows go as JSON")
    parser.add_argument("--rounds", type=int, default=400)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for way, batch_size, streaming in product(RATES, BATCH_SIZES, (False, True)):
        rows.append(measure(way, batch_size, streaming, args.rounds))
        print(format_row(rows[-1]), flush=True)
    num_ok = sum(row.meets_bar for row in rows)
    print(f"bar: {BAR_US:g} us a round that is not streamed; {num_ok} of {len(rows)} rows ok")
    report = {
        "python": platform.python_version(),
        "bar_us": BAR_US,
        "rows": [asdict(row) for row in rows],
    }
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if num_ok == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
