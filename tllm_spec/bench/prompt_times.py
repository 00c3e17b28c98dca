"""How long the prompts of a round take on this machine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, count
from time import perf_counter
from typing import Any
from uuid import uuid4

from tllm_spec.executor.build import BuiltExecutor
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes
from tllm_spec.recording.replay import request_of, run_to_end
from tllm_spec.recording.traffic_record import TrafficRecord

TRIALS = 3  # the first may compile; other work on the machine only adds time
IN_A_ROW = 4  # rounds of a trial
AT_ONCE = (2, 4, 8)  # prompts of about the median length


def measured_prompt_seconds(
    built: BuiltExecutor,
    records: Sequence[TrafficRecord],
    max_batch_size: int,
    *,
    with_drafts: bool,
) -> Callable[[int], float]:
    """Seconds of prompts with so many tokens in total. A short, a median and a long recorded prompt
    are measured, and several at once, without the prefix cache; between them are straight lines."""
    ordered = sorted(records, key=lambda each: len(each.prompt))
    middle, most = len(ordered) // 2, min(max_batch_size, len(ordered))
    groups = [[ordered[0]], [ordered[middle]], [ordered[-1]]]
    groups += [ordered[max(0, middle - n // 2) :][:n] for n in AT_ONCE if n <= most]
    ids = count()
    found = {
        sum(len(each.prompt) for each in group): _seconds(built, group, ids, with_drafts)
        for group in groups
    }
    sizes = sorted(found)
    rising = accumulate((found[size] for size in sizes), max)
    times = MeasuredRoundTimes({size: {0: time} for size, time in zip(sizes, rising, strict=True)})
    return lambda num_tokens: times.round_time(num_tokens, 0)


def _seconds(
    built: BuiltExecutor, group: Sequence[TrafficRecord], ids: Iterator[int], with_drafts: bool
) -> float:
    """The time of all prompts of the group at once, in rounds that follow one another, so that the
    host's work overlaps with the device's as in a busy engine."""
    times = []
    for _ in range(TRIALS):
        rounds = [_requests(built, group, ids, with_drafts) for _ in range(IN_A_ROW)]
        start = perf_counter()
        for requests in rounds[:-1]:
            built.queue.put(requests)
            built.executor.step()
        run_to_end(built, rounds[-1])
        times.append((perf_counter() - start) / IN_A_ROW)
    return min(times)


def _requests(
    built: BuiltExecutor, group: Sequence[TrafficRecord], ids: Iterator[int], with_drafts: bool
) -> list[LlmRequest]:
    """Requests for the group's prompts that end with their first token."""
    numbered = [request_of(next(ids), record, built.limits) for record in group]
    ending: dict[str, Any] = {"max_tokens": 1, "stop_checker": None}
    if not with_drafts:
        ending["draft_limit"] = 0
    return [replace(each, cache_salt=uuid4().hex, **ending) for each in numbered]
