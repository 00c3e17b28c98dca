"""Load on a running server: a client of streamed answers, requests at a rate or a concurrency, and
the report of their latencies."""

from __future__ import annotations

import asyncio
import json
import random
import re
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import h11

from tllm_spec.bench.dataset import BenchRequest
from tllm_spec.bench.report import MS, format_rows, percentiles
from tllm_spec.text.chat_prompt import Conversation

# A small HTTP/1.1 client for benchmarks: sends JSON, gives each server-sent event with its time.
#
# Over plain asyncio streams, so that the client costs little and times are those of arrival.


class HttpError(Exception):
    """An answer with another status than 200."""


@dataclass(frozen=True)
class Target:
    """base_url: of the API, such as http://localhost:8000/v1. Raises ValueError for other URLs."""

    base_url: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url = {self.base_url!r}: http://HOST:PORT/v1 is needed")

    @property
    def root(self) -> str:
        """Where `/metrics` is: the path without /v1."""
        return urlsplit(self.base_url).path.rstrip("/").removesuffix("/v1")

    @property
    def api(self) -> str:
        return urlsplit(self.base_url).path.rstrip("/")


async def get(target: Target, path: str) -> bytes:
    """The body of an answer. Raises HttpError, and OSError without a connection."""
    return b"".join([chunk async for chunk in _chunks(target, "GET", path, None)])


async def events(
    target: Target, path: str, body: dict[str, Any]
) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Yields `(time.perf_counter(), data)` of each event but the last, [DONE]. Raises as
    `get`."""
    buffer = b""
    async for chunk in _chunks(target, "POST", path, body):
        arrived = perf_counter()
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield arrived, json.loads(data)


async def _chunks(
    target: Target, method: str, path: str, body: dict[str, Any] | None
) -> AsyncIterator[bytes]:
    """Raises ConnectionError if the connection ends too early."""
    parts, content = urlsplit(target.base_url), b"" if body is None else json.dumps(body).encode()
    headers = {
        "Host": parts.netloc.rpartition("@")[2],
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "Connection": "close",
    }
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    is_tls, protocol, status = parts.scheme == "https", h11.Connection(h11.CLIENT), 0
    reader, writer = await asyncio.open_connection(
        parts.hostname,
        parts.port or (443 if is_tls else 80),
        ssl=ssl.create_default_context() if is_tls else None,
    )
    try:
        request = h11.Request(method=method, target=path, headers=list(headers.items()))
        for sent in (request, h11.Data(data=content), h11.EndOfMessage()):
            writer.write(protocol.send(sent) or b"")
        refused = b""
        while not isinstance(event := protocol.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                protocol.receive_data(await reader.read(1 << 16))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data) and status == 200:
                yield bytes(event.data)
            elif isinstance(event, h11.Data):
                refused += event.data
    except h11.RemoteProtocolError as error:
        when = "within an answer" if status else "without an answer"
        raise ConnectionError(f"the server closed the connection {when}") from error
    finally:
        writer.close()
    if status != 200:
        raise HttpError(f"{status}: {refused[:500].decode(errors='replace')}")


# Sends a data set to an OpenAI-compatible server and notes when each token arrives.


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
    """Whether a chunk of either API has some."""
    delta = choice.get("delta") or {}
    return any((choice.get("text"), delta.get("content"), delta.get("reasoning_content")))


# The figures of `tllm-bench serve`.


# Counters of drafting rounds and of what they gave, by server: ours, then vLLM's.
ACCEPTANCE = (
    ("tllm_spec_request_rounds_total", "tllm_spec_emitted_tokens_total", 0),
    ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total", 1),
)
GOALS = ("ttft", "tpot", "e2el")  # milliseconds, by vLLM's names


def parse_goals(given: Sequence[str]) -> dict[str, float]:
    """Goals in milliseconds by name, from texts such as `ttft:200`. Raises ValueError for anything
    else."""
    goals = {}
    for each in given:
        name, _, limit = each.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            goals[name] = -1.0
        if name not in GOALS or goals[name] <= 0:
            names = ", ".join(GOALS)
            raise ValueError(f"goodput = {each!r}: NAME:MILLISECONDS is needed, NAME of {names}")
    return goals


def serve_report(
    run: ServeRun, goals: Mapping[str, float], metrics: tuple[str, str] | None
) -> dict[str, Any]:
    """metrics: the texts of /metrics before and after the run, if the server has them."""
    done = [sent for sent in run.sent if sent.error is None]
    errors = Counter(sent.error for sent in run.sent if sent.error is not None)
    tpots = [tpot for sent in done if (tpot := sent.tpot) is not None]
    num_tokens = sum(sent.num_tokens for sent in done)
    report: dict[str, Any] = {
        "load": run.load.name,
        "temperature": run.temperature,
        "requests": len(run.sent),
        "failed": len(run.sent) - len(done),
        "errors": dict(errors.most_common(3)),
        "elapsed_s": run.elapsed,
        "request_throughput_req_s": len(done) / run.elapsed,
        "output_throughput_tok_s": num_tokens / run.elapsed,
        "total_throughput_tok_s": (num_tokens + sum(s.num_prompt_tokens for s in done))
        / run.elapsed,
        "ttft_ms": percentiles([sent.ttft * MS for sent in done]),
        "tpot_ms": percentiles([tpot * MS for tpot in tpots]),
        "itl_ms": percentiles([gap * MS for sent in done for gap in sent.gaps]),
        "e2el_ms": percentiles([sent.latency * MS for sent in done]),
    }
    if goals:
        times = [{"ttft": s.ttft, "tpot": s.tpot or 0.0, "e2el": s.latency} for s in done]
        good = (all(each[name] * MS <= goals[name] for name in goals) for each in times)
        report["goodput_req_s"] = sum(good) / run.elapsed
    length = None if metrics is None else acceptance_length(*metrics)
    return report | ({} if length is None else {"acceptance_length": length})


def acceptance_length(before: str, after: str) -> float | None:
    """Tokens per round between two texts of /metrics; None without rounds."""
    for rounds_name, tokens_name, bonus in ACCEPTANCE:
        rounds = _total(after, rounds_name) - _total(before, rounds_name)
        if rounds:
            return bonus + (_total(after, tokens_name) - _total(before, tokens_name)) / rounds
    return None


def _total(text: str, name: str) -> float:
    found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)", text, re.MULTILINE)
    return sum(map(float, found))


def format_serve(reports: Sequence[Mapping[str, Any]]) -> str:
    """One row for each load."""
    optional = {"goodput_req_s": "goodput/s", "acceptance_length": "acceptance length"}
    found = [name for name in optional if any(name in report for report in reports)]
    columns = [
        ("load", "{load}"),
        ("temperature", "{heat}"),
        ("requests/s", "{request_throughput_req_s:.2f}"),
        ("tokens/s", "{output_throughput_tok_s:.1f}"),
        ("failed", "{failed}"),
        ("TTFT p50", "{ttft_ms[p50]:.1f}"),
        ("p99", "{ttft_ms[p99]:.1f}"),
        ("TPOT p50", "{tpot_ms[p50]:.1f}"),
        ("p99", "{tpot_ms[p99]:.1f}"),
        ("ITL p99", "{itl_ms[p99]:.1f}"),
        ("E2E p50", "{e2el_ms[p50]:.1f}"),
        ("p99 (ms)", "{e2el_ms[p99]:.1f}"),
        *((optional[name], f"{{{name}:.2f}}") for name in found),
    ]
    heats = (each["temperature"] for each in reports)
    shown = ["server's" if heat is None else str(heat) for heat in heats]
    rows = [{**each, "heat": heat} for each, heat in zip(reports, shown, strict=True)]
    return format_rows(columns, rows)
