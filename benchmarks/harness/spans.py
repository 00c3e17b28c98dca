"""From a profiler's trace to spans: what the host and the device do in steady rounds."""

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from benchmarks.harness.engine import PHASE

Event = Mapping[str, Any]
HOST = ("schedule", "launch", "read", "wait")
DEVICE = ("target", "draft", "idle")


@dataclass(frozen=True)
class Span:
    """`kind`: one of HOST or DEVICE. `start`, `end`: microseconds. `wait` lies inside `read`."""

    kind: str
    start: float
    end: float

    @property
    def is_host(self) -> bool:
        return self.kind in HOST


@dataclass(frozen=True)
class Timeline:
    """`round_us`, `idle_us`: medians of all rounds traced. `spans`: a few rounds, from 0 on."""

    path: str
    round_us: float
    idle_us: float
    spans: tuple[Span, ...]


def timeline(path: str, events: Sequence[Event], first: int, num_drawn: int) -> Timeline:
    """Reads an annotated trace. The spans are those of `num_drawn` rounds from round `first` on; a
    round begins when the host schedules it."""
    spans = spans_of(events)
    starts = [span.start for span in spans if span.kind == "schedule"]
    idle = [span for span in spans if span.kind == "idle"]
    rounds = list(pairwise(starts))[1:]  # the device's first round began before
    drawn = clipped(spans, starts[first], starts[first + num_drawn])
    return Timeline(
        path,
        statistics.median(end - start for start, end in rounds),
        statistics.median(
            sum(span.end - span.start for span in clipped(idle, *each)) for each in rounds
        ),
        tuple(drawn),
    )


def clipped(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """The parts of spans inside an interval, which then begins at 0."""
    return [
        replace(span, start=max(span.start, start) - start, end=min(span.end, end) - start)
        for span in spans
        if span.start < end and span.end > start
    ]


def spans_of(events: Sequence[Event]) -> list[Span]:
    """The spans of both lanes, by start."""
    noted = [
        Span(event["name"].removeprefix(PHASE), event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(PHASE)
    ]
    work = _device_work(events, noted)
    idle = [
        Span("idle", before.end, after.start)
        for before, after in pairwise(work)
        if after.start > before.end
    ]
    host = [span for span in noted if span.is_host]
    return sorted(host + work + idle, key=lambda span: (span.start, -span.end))


def _device_work(events: Sequence[Event], noted: Sequence[Span]) -> list[Span]:
    """One span for each graph launch, or other launch; on a CPU, which is its own device, one for
    each phase that computes."""
    launched_at = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]
    }
    on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    drafts, launches = (_Phases(noted, kind) for kind in ("draft", "launch"))
    found: dict[tuple[str, object], list[Span]] = {}
    for event in on_gpu or [e for e in events if e.get("cat") == "cpu_op"]:
        key: object = event["args"].get("correlation") if on_gpu else None
        at = launched_at.get(key, event["ts"])
        draft, launch = drafts.at(at), launches.at(at)
        if draft is None and launch is None and not on_gpu:
            continue  # the host's own
        kind = "target" if draft is None else "draft"
        group = kind, key if on_gpu else (launch, draft)
        found.setdefault(group, []).append(Span(kind, event["ts"], event["ts"] + event["dur"]))
    merged = [
        Span(kind, min(each.start for each in parts), max(each.end for each in parts))
        for (kind, _), parts in found.items()
    ]
    return _without_overlaps(sorted(merged, key=lambda span: span.start))


def _without_overlaps(spans: Iterable[Span]) -> list[Span]:
    """By start. Where one begins before the one before it ends, that one is cut, and goes on
    after it: on a CPU a round's drafts are made inside its launch."""
    left: list[Span] = []
    for span in spans:
        if left and left[-1].end > span.start:
            outer = left.pop()
            left.append(replace(outer, end=span.start))
            left.append(span)
            if outer.end > span.end:
                left.append(replace(outer, start=span.end))
        else:
            left.append(span)
    return [span for span in left if span.end > span.start]


class _Phases:
    """The annotations of a kind, which do not overlap."""

    def __init__(self, noted: Iterable[Span], kind: str) -> None:
        self._spans = sorted(
            (span for span in noted if span.kind == kind), key=lambda span: span.start
        )
        self._starts = [span.start for span in self._spans]

    def at(self, time: float) -> int | None:
        """The number of the one at that time."""
        index = bisect_right(self._starts, time) - 1
        return index if index >= 0 and time <= self._spans[index].end else None
