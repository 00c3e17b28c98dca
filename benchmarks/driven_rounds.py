"""Rounds of generation driven one by one, without the server's thread: an executor that is filled,
timed and traced.

Knows an executor's public interface and what a profiler trace looks like; no bars, no tables.
"""

import functools
import gc
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch

from tllm_spec.config import LlmArgs
from tllm_spec.executor import build
from tllm_spec.executor.building import engines
from tllm_spec.executor.decoding_rules import DecodingRules
from tllm_spec.executor.request import DraftCounters, LlmRequest, RequestState
from tllm_spec.executor.rounds.transfer import ToHost
from tllm_spec.models.linear import Linear
from tllm_spec.sampling_params import SamplingParams

WARM_UP_ROUNDS = 20
SPAN = "rounds"  # the trace's own beginning and end wait for the device, too
Trace = list[dict[str, Any]]


@dataclass(frozen=True)
class Timed:
    """`context`: tokens of a request in the middle of the rounds, on average over the requests."""

    round_ms: float
    tokens_a_round: float
    context: float


@dataclass(frozen=True)
class HostTime:
    """Milliseconds of a round in which the executor's thread does not wait for the device;
    `launch`: of them in the call that launches the graph. `additions`: of 100,000 additions in
    Python in the same seconds, median; the speed of machines that are shared changes."""

    median: float
    p99: float
    launch: float
    additions: float


class Rounds:
    """An executor of at most `max_batch_size` requests, each of `max_seq_len` tokens at most.

    `start` fills it with requests that generate until `stop`, or until there is no more room, which
    raises
    RuntimeError: rounds of fewer requests would be timed.
    `weights_of`: whose target is this one's, too, for no shorter requests. The same kernel may take
    longer on a copy of its weights elsewhere in memory, which would be in a comparison of two
    engines."""

    def __init__(
        self,
        model: str,
        *,
        max_batch_size: int,
        max_seq_len: int,
        weights_of: "Rounds | None" = None,
        **options: Any,
    ) -> None:
        defaults = {"max_num_tokens": 8192, "cuda_graph_config": {"batch_sizes": [max_batch_size]}}
        args = LlmArgs.from_kwargs(
            model,
            skip_tokenizer_init=True,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            **(defaults | options),
        )
        with ExitStack() as stack:
            if weights_of is not None:
                target = weights_of.executor.parts.runner.engine.model
                # The graphs of the other go on writing to these products' workspaces.
                self._held = [
                    layer.products for layer in target.modules() if isinstance(layer, Linear)
                ]
                stack.enter_context(mock.patch.object(engines, "load_target", lambda plan: target))
            self.built = build.build_executor(args, None, lambda responses: None)
        self.executor = self.built.executor
        self.requests: list[LlmRequest] = []
        self._ids = count(1)

    def start(self, batch_size: int, prompt_len: int, **rules: Any) -> None:
        """`batch_size` requests of random prompts, prefilled and some rounds on, in the place of
        those before. rules: sampling parameters of the last one; the others are greedy."""
        self.stop()
        max_tokens = self.built.max_seq_len - prompt_len
        self.requests = self.put(batch_size - 1, prompt_len, max_tokens) if batch_size > 1 else []
        self.requests += self.put(1, prompt_len, max_tokens, **rules)
        while not all(request.state is RequestState.GENERATION for request in self.requests):
            self.executor.step()
        self.run(WARM_UP_ROUNDS)

    def stop(self) -> None:
        for request in self.requests:
            self.built.queue.cancel(request.request_id)
        self.requests = []
        self.run_until_idle()

    def put(self, number: int, prompt_len: int, max_tokens: int, **rules: Any) -> list[LlmRequest]:
        """Queues requests beside what runs, with these sampling parameters."""
        requests = [
            self._request(next(self._ids), prompt_len, max_tokens, **rules) for _ in range(number)
        ]
        self.built.queue.put(requests)
        return requests

    def run(self, number: int) -> None:
        for _ in range(number):
            self.executor.step()
        if any(request.is_finished for request in self.requests):
            raise RuntimeError(
                "a request ended before its rounds were measured: max_seq_len is too small"
            )

    def run_until_idle(self) -> None:
        while self.executor.step():
            pass

    def timed(self, number: int) -> Timed:
        synchronize()
        before, start = self._num_tokens(), time.perf_counter()
        self.run(number)
        synchronize()
        seconds, after = time.perf_counter() - start, self._num_tokens()
        batch_size = len(self.requests)
        return Timed(
            seconds / number * 1e3,
            (after - before) / number / batch_size,
            (before + after) / 2 / batch_size,
        )

    def seconds_of_prompts(self, number: int, prompt_len: int) -> float:
        """From the submission of prompts to an idle executor until all are prefilled and have their
        first token."""
        self.put(number, prompt_len, 1)
        synchronize()
        start = time.perf_counter()
        self.run_until_idle()
        synchronize()
        return time.perf_counter() - start

    def host_time(self, number: int) -> HostTime:
        """Of that many rounds: each step's wall time less what its wait for the device's results
        took."""
        host, additions = [], []
        with (
            stopwatch(ToHost, "wait") as waits,
            stopwatch(torch.cuda.CUDAGraph, "replay") as launches,
        ):
            for _ in range(number):
                seen, start = len(waits), time.perf_counter()
                self.executor.step()
                host.append((time.perf_counter() - start - sum(waits[seen:])) * 1e3)
                if len(host) % (1 + number // 5) == 0:
                    additions.append(ms_of_additions())
        host.sort()
        p99 = host[min(len(host) - 1, int(0.99 * len(host)))]
        launch = statistics.median(launches or [0.0]) * 1e3
        return HostTime(
            statistics.median(host),
            p99,
            launch,
            statistics.median(additions or [ms_of_additions()]),
        )

    def never_waits(self) -> None:
        """Raises RuntimeError when any op of a round synchronises with the device; the results'
        event is not one."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.run(10)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def traced(self, number: int) -> Trace:
        """The trace of that many rounds, as Chrome reads it."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            with torch.profiler.record_function(SPAN):
                self.run(number)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            profile.export_chrome_trace(str(file))
            events: Trace = json.loads(file.read_text())["traceEvents"]
        return events

    def _request(
        self, request_id: int, prompt_len: int, max_tokens: int, **rules: Any
    ) -> LlmRequest:
        vocab_size, draft_len = self.built.model_config.vocab_size, self.built.max_draft_len
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **rules)
        return LlmRequest(
            request_id=request_id,
            tokens=Random(request_id).choices(range(vocab_size), k=prompt_len),
            rules=DecodingRules.from_params(params, vocab_size=vocab_size, end_ids=(), encode=None),
            seed=request_id,
            arrival=request_id,
            max_tokens=max_tokens,
            draft_limit=draft_len,
            counters=DraftCounters(draft_len),
        )

    def _num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)


@contextmanager
def stopwatch(owner: object, name: str, *, settle: bool = False) -> Iterator[list[float]]:
    """Inside the block every call of `owner.name` adds its seconds to the list. `settle`: the
    device's work too."""
    original, seconds = getattr(owner, name), list[float]()

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            if settle:
                synchronize()
            seconds.append(time.perf_counter() - start)

    with mock.patch.object(owner, name, timed):
        yield seconds


def ms_of_additions(number: int = 100_000) -> float:
    start, total = time.perf_counter(), 0
    for value in range(number):
        total += value
    return (time.perf_counter() - start) * 1e3


def synchronize() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch has no annotation
        torch.cuda.synchronize()


def release() -> None:
    """Gives the device memory back of engines that nobody holds any more."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch has no annotation
        torch.cuda.empty_cache()


def gap_between_launches(events: Trace, launches_a_round: int = 1) -> float:
    """Median microseconds of a round in which nothing runs between the work of graph launches;
    copies count as work."""
    launches = {e["args"]["correlation"] for e in events if e.get("name") == "cudaGraphLaunch"}
    work: list[tuple[float, float]] = []
    spans: dict[int, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        start, end = event["ts"], event["ts"] + event["dur"]
        work.append((start, end))
        if event["args"].get("correlation") in launches:
            spans[event["args"]["correlation"]] += [start, end]
    rounds = sorted((min(times), max(times)) for times in spans.values())
    work.sort()
    gaps = []
    for (_, end), (start, _) in pairwise(rounds):
        busy = sum(
            min(stop, start) - max(begin, end)
            for begin, stop in work
            if begin < start and stop > end
        )
        gaps.append(start - end - busy)
    starts = range(0, len(gaps) - launches_a_round + 1, launches_a_round)
    return statistics.median(sum(gaps[start : start + launches_a_round]) for start in starts)
