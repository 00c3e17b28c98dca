"""An executor that is driven round by round, without the server's thread: filled, timed, traced.

Only this module and forced_rounds.py reach into the engine."""

import functools
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch

from tllm_spec.attention.geometry import KVPool
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.executor import build
from tllm_spec.executor.building import engines
from tllm_spec.executor.device.transfer import ToHost
from tllm_spec.executor.request import DecodingRules, DraftCounters, LlmRequest, RequestState
from tllm_spec.executor.rounds.round_runner import RoundRunner
from tllm_spec.grammar.grammar_state import GrammarState
from tllm_spec.models.formats.weight_format import CudaWeight
from tllm_spec.models.linear import Linear
from tllm_spec.ranks import run_until_end
from tllm_spec.sampling_params import SamplingParams

WARM_UP_ROUNDS = 20
Trace = list[dict[str, Any]]


@dataclass(frozen=True)
class Timed:
    """Means over requests. `context`: tokens of a request halfway through the timed rounds."""

    round_ms: float
    tokens_per_round: float
    context: float


@dataclass(frozen=True)
class HostTime:
    """Milliseconds of a round in which the executor's thread does not wait for the device.

    `launch`: the part in the graph launch."""

    median: float
    p99: float
    launch: float


class Rounds:
    """An executor of at most `max_batch_size` requests of at most `max_seq_len` tokens.

    `weights_of`: another engine whose target weights are used, too. A kernel may take longer on a
    copy of the weights elsewhere in memory, which would blur a comparison of two engines. Of
    several ranks, all build the same engine; rank 0 drives it, the others call `follow`."""

    def __init__(
        self,
        model: str,
        *,
        max_batch_size: int,
        max_seq_len: int,
        weights_of: "Rounds | None" = None,
        communicator: Communicator = SINGLE,
        **options: Any,
    ) -> None:
        defaults = {"max_num_tokens": 8192, "cuda_graph_config": {"batch_sizes": [max_batch_size]}}
        self._args = args = LlmArgs.from_kwargs(
            model,
            skip_tokenizer_init=True,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            **(defaults | options),
        )
        with ExitStack() as stack:
            if weights_of is not None:
                target = weights_of.executor.parts.runner.engine.model
                # The other engine's graphs keep writing to these workspaces.
                layers = [layer for layer in target.modules() if isinstance(layer, Linear)]
                formats = [layer.weight_format for layer in layers]
                self._held = [each.tuned_gemms for each in formats if isinstance(each, CudaWeight)]
                stack.enter_context(mock.patch.object(engines, "load_target", lambda plan: target))
            self.built = build.build_executor(args, None, lambda responses: None, communicator)
        self.executor = self.built.executor
        self.executor.enter_thread()  # small models on a CPU run on one thread
        self.requests: list[LlmRequest] = []
        self._ids = count(1)

    @property
    def has_graphs(self) -> bool:
        return self.executor.parts.runner.graphs is not None

    def start(
        self,
        batch_size: int,
        prompt_len: int,
        grammars: Sequence[GrammarState] = (),
        adapters: Sequence[str] = (),
        **params: Any,
    ) -> None:
        """Replaces what runs by `batch_size` requests with random prompts, prefilled and warm.

        `params`: SamplingParams of the last request; the others are greedy. `grammars` and
        `adapters`: of the first requests."""
        self.stop()
        max_tokens = self.built.limits.max_seq_len - prompt_len
        self.requests = [
            self._request(next(self._ids), prompt_len, max_tokens, grammar)
            for grammar in [*grammars, *[None] * (batch_size - len(grammars))]
        ]
        for request, adapter in zip(self.requests, adapters, strict=False):
            request.adapter = adapter
        if params:
            self.requests[-1:] = [self._request(next(self._ids), prompt_len, max_tokens, **params)]
        self._queue(self.requests)
        while not all(request.state is RequestState.GENERATION for request in self.requests):
            self.executor.step()
        self.run(WARM_UP_ROUNDS)

    def follow(self) -> None:
        """Rounds of another rank, until rank 0 calls `end`."""
        run_until_end(self.built, self._args, None)

    def end(self) -> None:
        """The last call: the other ranks end, too."""
        self.built.queue.end(None)

    def stop(self) -> None:
        for request in self.requests:
            self.built.queue.cancel(request.request_id)
        self.requests = []
        self.run_until_idle()

    def put(self, number: int, prompt_len: int, max_tokens: int, **params: Any) -> list[LlmRequest]:
        """Queues more requests."""
        requests = [
            self._request(next(self._ids), prompt_len, max_tokens, **params) for _ in range(number)
        ]
        self._queue(requests)
        return requests

    def run(self, number: int) -> None:
        """Raises RuntimeError when a request ends: rounds of fewer requests would be timed."""
        for _ in range(number):
            self.executor.step()
        if any(request.is_finished for request in self.requests):
            raise RuntimeError("a request ended while it was measured: max_seq_len is too small")

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
        tokens_per_round = (after - before) / number / batch_size
        return Timed(seconds / number * 1e3, tokens_per_round, (before + after) / 2 / batch_size)

    def round_ms(self, number: int) -> float:
        return self.timed(number).round_ms

    def prompts_ms(self, number: int, prompt_len: int) -> float:
        """Milliseconds from queueing prompts in an idle executor until each has its first token."""
        self.put(number, prompt_len, 1)
        synchronize()
        start = time.perf_counter()
        self.run_until_idle()
        synchronize()
        return (time.perf_counter() - start) * 1e3

    def host_time(self, number: int) -> HostTime:
        """Each step's wall time less the time that it waits for the device's results."""
        host = []
        with (
            stopwatch(ToHost, "wait") as waits,
            stopwatch(torch.cuda.CUDAGraph, "replay") as launches,
        ):
            for _ in range(number):
                seen, start = len(waits), time.perf_counter()
                self.executor.step()
                host.append((time.perf_counter() - start - sum(waits[seen:])) * 1e3)
        p99 = sorted(host)[min(len(host) - 1, int(0.99 * len(host)))]
        launch = statistics.median(launches or [0.0]) * 1e3
        return HostTime(statistics.median(host), p99, launch)

    def traced(self, number: int) -> Trace:
        """The events of that many rounds in Chrome's trace format."""
        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU, *([kinds.CUDA] if torch.cuda.is_available() else [])]
        with torch.profiler.profile(activities=activities) as profile:
            self.run(number)
            synchronize()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            profile.export_chrome_trace(str(file))
            events: Trace = json.loads(file.read_text())["traceEvents"]
        return events

    def _request(
        self,
        request_id: int,
        prompt_len: int,
        max_tokens: int,
        grammar: GrammarState | None = None,
        **params: Any,
    ) -> LlmRequest:
        vocab_size, draft_len = self.built.model_config.vocab_size, self.built.limits.max_draft_len
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
        rules = DecodingRules.from_params(sampling, vocab_size=vocab_size, end_ids=(), encode=None)
        return LlmRequest(
            request_id=request_id,
            tokens=Random(request_id).choices(range(vocab_size), k=prompt_len),
            rules=rules,
            seed=request_id,
            arrival=request_id,
            max_tokens=max_tokens,
            draft_limit=draft_len,
            grammar=grammar,
            counters=DraftCounters(draft_len),
        )

    def _queue(self, requests: Sequence[LlmRequest]) -> None:
        """A call puts samples of one prompt."""
        for request in requests:
            self.built.queue.put([request])

    def _num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)


def in_turns(sides: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """What each side returns, by turns, after one warm-up turn that does not count."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(1 + repeats):
        for name, measure in sides.items():
            value = measure()
            if turn:
                found[name].append(value)
    return found


@contextmanager
def stopwatch(owner: object, name: str, *, with_device: bool = False) -> Iterator[list[float]]:
    """Inside the block every call of `owner.name` appends its seconds; `with_device`: including
    the device's work."""
    original, seconds = getattr(owner, name), list[float]()

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            if with_device:
                synchronize()
            seconds.append(time.perf_counter() - start)

    with mock.patch.object(owner, name, timed):
        yield seconds


@contextmanager
def start_up_phases() -> Iterator[dict[str, list[float]]]:
    """Seconds of the phases of every engine that is built inside the block."""
    phases = (
        ("weights", engines, "load_model"),
        ("head", engines, "load_head"),
        ("KV pools", KVPool, "__init__"),
        ("graphs", RoundRunner, "capture_graphs"),
    )
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(stopwatch(owner, method, with_device=True))
            for name, owner, method in phases
        }


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def release() -> None:
    """Returns the device memory of engines that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
