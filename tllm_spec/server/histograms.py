"""Histograms of finished requests, for `/metrics`. Each front process writes a file of its own;
any of them reads all, so the figures are those of the whole server, also after a front has died.

prometheus_client's multiprocess mode does not serve: its files have holes, so on a full disk the
first figure would end the front with SIGBUS."""

from __future__ import annotations

import logging
import mmap
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from struct import calcsize
from typing import Any, Final

from tllm_spec.outputs import RequestOutput

logger = logging.getLogger(__name__)

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
LENGTHS = (1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 12, 16)
NUMBER: Final = "d"  # a float of 8 bytes; the processor writes it at once


TIME_TO_FIRST_TOKEN = "trtllm_time_to_first_token_seconds"
TIME_PER_OUTPUT_TOKEN = "trtllm_time_per_output_token_seconds"
QUEUE_TIME = "trtllm_request_queue_time_seconds"
LATENCY = "trtllm_e2e_request_latency_seconds"
PROMPT_TOKENS = "tllm_spec_request_prompt_tokens"
GENERATION_TOKENS = "tllm_spec_request_generation_tokens"
ACCEPTANCE_LENGTH = "tllm_spec_request_acceptance_length"
# The help text, and upper bounds of the buckets, without infinity.
HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    TIME_TO_FIRST_TOKEN: ("Arrival to first token of streamed requests", SECONDS),
    TIME_PER_OUTPUT_TOKEN: (
        "Mean time between tokens of a streamed request, after its first",
        SECONDS,
    ),
    QUEUE_TIME: ("Arrival to first round of requests", SECONDS),
    LATENCY: ("Arrival to end of requests", SECONDS),
    PROMPT_TOKENS: ("Prompt tokens of requests", TOKENS),
    GENERATION_TOKENS: ("Generated tokens of requests, all samples together", TOKENS),
    ACCEPTANCE_LENGTH: ("Tokens emitted per decode round of a request", LENGTHS),
}
OFFSETS: dict[str, int] = {}
SIZE = 0  # numbers
for _name, (_, _bounds) in HISTOGRAMS.items():
    OFFSETS[_name] = SIZE
    SIZE += len(_bounds) + 2  # the last bucket, and the sum
NUM_BYTES = SIZE * calcsize(NUMBER)


@dataclass(frozen=True)
class Histogram:
    """counts: of each bucket alone; the last has no bound."""

    bounds: Sequence[float]
    counts: Sequence[float]
    sum: float


class Histograms:
    """folder: of the files that all fronts share; None: there is one front, and no file. A front
    whose file cannot be made, as on a full disk, keeps its figures to itself and logs that."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._own_name = f"histograms-{os.getpid()}"
        shared = None if folder is None else _shared_memory(folder / self._own_name)
        self._numbers = memoryview(shared or bytearray(NUM_BYTES)).cast(NUMBER)

    def add(self, output: RequestOutput, is_streamed: bool) -> None:
        """A finished request. `is_streamed`: to the client, so it has times of single tokens."""
        metrics, num_tokens = output.metrics, sum(each.length for each in output.outputs)
        first, end = metrics.first_token_time, metrics.finished_time
        if is_streamed:
            self._observe(TIME_TO_FIRST_TOKEN, metrics.time_to_first_token)
            is_timed = len(output.outputs) == 1 and num_tokens > 1
            if is_timed and first is not None and end is not None:
                self._observe(TIME_PER_OUTPUT_TOKEN, (end - first) / (num_tokens - 1))
        self._observe(QUEUE_TIME, metrics.queue_time)
        self._observe(LATENCY, metrics.latency)
        self._observe(PROMPT_TOKENS, len(output.prompt_token_ids))
        self._observe(GENERATION_TOKENS, num_tokens)
        stats = output.speculative_decoding
        if stats is not None and stats.rounds:
            self._observe(ACCEPTANCE_LENGTH, stats.acceptance_length)

    def read(self) -> dict[str, Histogram]:
        """The histograms of all fronts, by name."""
        numbers = [list(self._numbers)]  # not of the file, which might have been removed
        if self._folder is not None:
            others = (
                each for each in self._folder.glob("histograms-*") if each.name != self._own_name
            )
            numbers += map(_numbers_of, others)
        totals = [sum(column) for column in zip(*numbers, strict=True)]
        found = {}
        for name, (_, bounds) in HISTOGRAMS.items():
            start, length = OFFSETS[name], len(bounds) + 1
            counts, total = totals[start : start + length], totals[start + length]
            found[name] = Histogram(bounds, counts, total)
        return found

    def _observe(self, name: str, value: float | None) -> None:
        if value is None:
            return
        (_, bounds), start = HISTOGRAMS[name], OFFSETS[name]
        self._numbers[start + bisect_left(bounds, value)] += 1
        self._numbers[start + len(bounds) + 1] += value


def _shared_memory(path: Path) -> mmap.mmap | None:
    """Zeros in a new file. None if it cannot be written, which is logged."""
    try:
        with open(path, "w+b") as file:
            # Written, because a full disk ends a process that touches a page that has no block yet.
            file.write(bytes(NUM_BYTES))
            file.flush()
            return mmap.mmap(file.fileno(), NUM_BYTES)
    except OSError as error:
        logger.warning(
            "%s was not written, so only this front process knows its histograms: %s", path, error
        )
        with suppress(OSError):
            path.unlink()
        return None


def _numbers_of(path: Path) -> list[float]:
    """Zeros for a file that another front is just making."""
    data = path.read_bytes().ljust(NUM_BYTES, b"\0")
    return list(memoryview(data).cast(NUMBER))


# `/perf_metrics`: the timings of finished requests, under TensorRT-LLM's names.


def perf_record(output: RequestOutput) -> dict[str, Any]:
    """A finished request as `/perf_metrics` shows it."""
    metrics, stats = output.metrics, output.speculative_decoding
    record: dict[str, Any] = {
        "timing_metrics": {  # seconds of a monotonic clock
            "arrival_time": metrics.arrival_time,
            "first_scheduled_time": metrics.first_scheduled_time,
            "first_token_time": metrics.first_token_time,
            "last_token_time": metrics.finished_time,
        }
    }
    if stats is not None and stats.num_drafted_tokens:
        record["speculative_decoding"] = {
            "acceptance_rate": stats.draft_acceptance_rate,
            "total_accepted_draft_tokens": stats.num_accepted_tokens,
            "total_draft_tokens": stats.num_drafted_tokens,
        }
    return {"request_id": output.request_id, "perf_metrics": record}
