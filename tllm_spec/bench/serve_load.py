"""Sends a data set to an OpenAI-compatible server and notes when each token arrives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

from tllm_spec.bench.dataset import BenchRequest
from tllm_spec.bench.sse_client import HttpError, Target, events
from tllm_spec.text.chat_prompt import Conversation


@dataclass(frozen=True)
class Load:
    """How requests are sent. request_rate: arrivals per second on average; None: as fast as
    `concurrency` allows. burstiness: shape of the gamma distribution of the gaps, as in vLLM's
    benchmark: 1 = Poisson arrivals, less = bursts, more = even. concurrency: requests in flight at
    most; None: no limit."""

    request_rate: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        if self.request_rate is None:
            return f"concurrency {self.concurrency}"
        return f"{self.request_rate:g} requests/s"

    def start_times(self, number: int) -> list[float]:
        """Seconds after the start, one for each request."""
        if self.request_rate is None:
            return [0.0] * number
        generator = random.Random(self.seed)
        scale = 1 / (self.request_rate * self.burstiness)
        times, now = [], 0.0
        for _ in range(number):
            times.append(now)
            now += generator.gammavariate(self.burstiness, scale)
        return times


@dataclass
class Sent:
    """A request. Times are seconds; increments are chunks with text. num_tokens: as the server
    counts them, or else the increments."""

    start: float
    arrivals: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.start

    @property
    def latency(self) -> float:
        return self.arrivals[-1] - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None with one token."""
        if self.num_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between increments (inter-token latency)."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]


@dataclass(frozen=True)
class ServeRun:
    """What one load gave. elapsed: seconds from the first request to the last token. temperature:
    of the requests; None: the server's own."""

    load: Load
    sent: list[Sent]
    elapsed: float
    temperature: float | None = None


async def send_all(
    target: Target,
    model: str,
    requests: Sequence[BenchRequest],
    load: Load,
    options: dict[str, Any],
    on_end: Callable[[], object] = lambda: None,
) -> ServeRun:
    """options: more keys of the bodies. on_end: called after each request."""
    limit = asyncio.Semaphore(load.concurrency or len(requests))
    begin = perf_counter()

    async def send(request: BenchRequest, start: float) -> Sent:
        await asyncio.sleep(max(0.0, begin + start - perf_counter()))
        async with limit:
            sent = await _send(target, model, request, options)
        on_end()
        return sent

    starts = load.start_times(len(requests))
    sent = await asyncio.gather(*map(send, requests, starts))
    elapsed = perf_counter() - begin
    return ServeRun(load, list(sent), elapsed, options.get("temperature"))


async def _send(target: Target, model: str, request: BenchRequest, options: dict[str, Any]) -> Sent:
    path, prompt = "completions", dict[str, Any](prompt=request.prompt)
    if isinstance(request.prompt, Conversation):
        path, prompt = "chat/completions", {"messages": request.prompt.messages}
    body = {
        "model": model,
        **prompt,
        "max_tokens": request.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    sent = Sent(perf_counter())
    try:
        async for arrived, data in events(target, f"{target.api}/{path}", body):
            if "error" in data:
                sent.error = str(data["error"].get("message"))
                break
            if any(map(_has_text, data.get("choices", ()))):
                sent.arrivals.append(arrived)
            if usage := data.get("usage"):
                sent.num_tokens = usage["completion_tokens"]
                sent.num_prompt_tokens = usage["prompt_tokens"]
    except (HttpError, OSError) as error:
        sent.error = str(error) or type(error).__name__
    if sent.error is None and not sent.arrivals:
        sent.error = "the answer has no text"
    sent.num_tokens = sent.num_tokens or len(sent.arrivals)
    return sent


def _has_text(choice: dict[str, Any]) -> bool:
    """Of a chunk of either API."""
    delta = choice.get("delta") or {}
    return any((choice.get("text"), delta.get("content"), delta.get("reasoning_content")))
