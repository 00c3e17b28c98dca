"""Which drafter and draft length recorded traffic would have been served best with.

A candidate's replay says how many rounds each request takes, and measured times how long prompts
and a round of a number of requests take. With the recorded arrivals that gives when each request
would have ended."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import accumulate, count
from math import ceil
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import uuid4

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.speculative_config import DecodingBaseConfig
from tllm_spec.executor.build import BuiltExecutor
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.recording.replay import replay, request_of, run_to_end
from tllm_spec.recording.traffic_record import TrafficRecord

DRAFT_LENS = (1, 2, 3, 5, 7, 10, 15)
# What would make rounds of another length than the one that is asked for.
WITHOUT_LIMITS = {
    "adaptive": None,
    "draft_len_schedule": None,
    "max_concurrency": None,
    "acceptance_rate_threshold": None,
    "acceptance_rate_window_size": None,
    "max_rejected_rounds": None,
}
PLAIN = "plain"
SIZES_OF_TREE = ("max_draft_len", "dynamic_tree_max_topK", "max_total_draft_tokens")
TREE_OPTIONS = {"use_dynamic_tree", *SIZES_OF_TREE[1:]}


@dataclass(frozen=True)
class Times:
    """Seconds on this machine. of_round: by the number of requests; of_prompts: of the prompts of a
    round, by their tokens."""

    of_round: Callable[[int], float]
    of_prompts: Callable[[int], float]


@dataclass(frozen=True)
class Candidate:
    """A way of decoding. drafter: whose round times are measured together. shape: of its drafts, by
    name. spec: None for plain decoding. options: the engine's other ones."""

    drafter: str
    shape: str
    spec: Mapping[str, Any] | None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return PLAIN if self.spec is None else f"{self.drafter} {self.shape}"


class Request(NamedTuple):
    """arrival: in seconds. num_tokens: of the prompt, without those in the prefix cache. rounds:
    after the prompt."""

    arrival: float
    num_tokens: int
    rounds: int


@dataclass(frozen=True)
class Score:
    """What a candidate would have done with the traffic. ms_per_token: mean of the requests'
    latencies, each divided by its tokens."""

    candidate: Candidate
    tokens_per_round: float
    output_tokens_per_s: float
    ms_per_token: float
    latency_s: float  # median
    num_rounds: int
    simulated: Sequence[str] = ()


def candidates_of(name: str, spec: DecodingBaseConfig) -> list[Candidate]:
    """A drafter with its own draft length and with shorter ones, and with each tree that it may
    choose; a tree without `adaptive` as it is."""
    own, trees = spec.as_options() | WITHOUT_LIMITS, trees_of(spec)
    if trees and not spec.mixes_trees:
        return [Candidate(name, str(trees[0].name), own)]
    lengths = sorted({spec.max_draft_len, *(k for k in DRAFT_LENS if k < spec.max_draft_len)})
    chain = {key: each for key, each in own.items() if key not in TREE_OPTIONS}
    found = [Candidate(name, str(k), chain | {"max_draft_len": k}) for k in lengths]
    for tree in trees:
        sizes = zip(SIZES_OF_TREE, (tree.depth, tree.topk, tree.num_nodes), strict=True)
        found.append(Candidate(name, str(tree.name), own | dict(sizes)))
    return found


def trees_of(spec: DecodingBaseConfig) -> list[DraftShape]:
    """The trees that it may draft; of those without `adaptive` the largest."""
    shapes = spec.shapes
    if spec.mixes_trees:
        return [shapes.of(tier) for tier in shapes.tree_tiers]
    return [shapes.longest] if shapes.longest.is_tree else []


def score(
    candidate: Candidate,
    records: Sequence[TrafficRecord],
    args: LlmArgs,
    times: Times,
    max_batch_size: int,
    states: Mapping[str, Path] = MappingProxyType({}),
) -> Score:
    """args: of the engine, with any drafter. states: as `replay` takes them. Raises ValueError for
    what cannot be replayed."""
    if candidate.spec is None:
        rounds = [SpeculativeStats(len(each.output) - 1, len(each.output) - 1) for each in records]
        causes: list[str] = []
    else:
        options = args.as_options() | {"speculative_config": dict(candidate.spec)}
        found = replay(records, LlmArgs(**options), states)
        rounds, causes = found.requests, found.simulated
    return score_of(candidate, records, rounds, times, max_batch_size, causes)


def score_of(
    candidate: Candidate,
    records: Sequence[TrafficRecord],
    rounds: Sequence[SpeculativeStats],
    times: Times,
    max_batch_size: int,
    simulated: Sequence[str] = (),
) -> Score:
    """rounds: of each record."""
    first = min(each.arrived_us for each in records)
    requests = []
    for each, stats in zip(records, rounds, strict=True):
        num_tokens = max(1, len(each.prompt) - each.cached_tokens)
        requests.append(Request((each.arrived_us - first) / 1e6, num_tokens, stats.rounds))
    seconds, num_rounds, latencies = simulate(requests, times, max_batch_size)
    lengths = [len(each.output) for each in records]
    total = sum(rounds, SpeculativeStats())
    return Score(
        candidate,
        total.acceptance_length or 1.0,
        sum(lengths) / seconds,
        1e3 * mean(took / num for took, num in zip(latencies, lengths, strict=True)),
        median(latencies),
        num_rounds,
        simulated,
    )


def best_of(scores: Sequence[Score]) -> Score:
    """The shortest time per token. It counts waiting, too, so under full load it is the throughput
    that decides."""
    return min(scores, key=lambda score: score.ms_per_token)


def simulate(
    requests: Sequence[Request], times: Times, max_batch_size: int
) -> tuple[float, int, list[float]]:
    """Seconds in total, rounds, and the seconds of each request from its arrival to its last token.
    Requests in order of arrival. A request's prompt is read next to a round of those before."""
    now, played, coming = requests[0].arrival, 0, 0
    latencies = [0.0] * len(requests)
    running: list[tuple[int, int]] = []  # the round after which each request ends, and its number
    while running or coming < len(requests):
        if not running:
            now = max(now, requests[coming].arrival)
        took, steps = times.of_round(len(running)) if running else 0.0, 1
        num_tokens, room = 0, max_batch_size - len(running)
        while coming < len(requests) and requests[coming].arrival <= now and room:
            num_tokens += requests[coming].num_tokens
            heappush(running, (played + 1 + requests[coming].rounds, coming))
            coming, room = coming + 1, room - 1
        if num_tokens:
            took += times.of_prompts(num_tokens)
        else:
            steps = running[0][0] - played
            if coming < len(requests) and room:
                steps = min(steps, max(1, ceil((requests[coming].arrival - now) / took)))
        now, played = now + steps * took, played + steps
        while running and running[0][0] <= played:
            _, number = heappop(running)
            latencies[number] = now - requests[number].arrival
    return now - requests[0].arrival, played, latencies


# How long the prompts of a round take on this machine.


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
