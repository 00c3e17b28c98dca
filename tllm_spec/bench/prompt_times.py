"""How long prompts take on this machine, from their queueing in an idle engine to the first token
of each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, count
from time import perf_counter
from uuid import uuid4

from tllm_spec.executor.build import BuiltExecutor
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes
from tllm_spec.recording.replay import request_of, run_to_end
from tllm_spec.recording.traffic_record import TrafficRecord

TRIALS = 3  # the first may compile; other work on the machine only adds time
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
    """Of all prompts of the group at once."""
    times = []
    for _ in range(TRIALS):
        numbered = [request_of(next(ids), record, built.limits) for record in group]
        requests = [
            replace(each, max_tokens=1, stop_checker=None, cache_salt=uuid4().hex)
            for each in numbered
        ]
        if not with_drafts:
            requests = [replace(request, draft_limit=0) for request in requests]
        start = perf_counter()
        run_to_end(built, requests)
        times.append(perf_counter() - start)
    return min(times)
