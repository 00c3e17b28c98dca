"""`/metrics` in Prometheus' text format, from what `LLM.server_info` says.

Names with `trtllm_` mean what they mean in TensorRT-LLM; those with `tllm_spec_` have no
counterpart there. Counters
count since the start: rates over time are the reader's to take.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SUCCESSES = ("stop", "length")

Described = Mapping[
    str, tuple[str, tuple[str, ...]]
]  # by name: a sentence, and where the state has it

GAUGES: Described = {
    "trtllm_num_requests_running": ("Requests that have a slot", ("num_requests_running",)),
    "trtllm_num_requests_waiting": (
        "Requests that wait for a slot or pages",
        ("num_requests_waiting",),
    ),
    "tllm_spec_draft_len": (
        "Draft length now for a batch of the latest size",
        ("speculative_num_steps",),
    ),
}
COUNTERS: Described = {
    "tllm_spec_preemptions": ("Running requests that were put back", ("num_preemptions",)),
    "tllm_spec_prompt_tokens": ("Tokens of prompts", ("totals", "prompt_tokens")),
    "tllm_spec_prefix_hit_tokens": (
        "Prompt tokens found in the cache",
        ("totals", "cached_prompt_tokens"),
    ),
    "tllm_spec_generated_tokens": ("Tokens of outputs", ("totals", "generated_tokens")),
    "tllm_spec_draft_len_changes": (
        "Rounds with another draft length than the round before",
        ("totals", "draft_len_changes"),
    ),
    "tllm_spec_draft_len_switches": (
        "Decisions of the controller for another draft length",
        ("controller", "decisions", "num_switches"),
    ),
    "trtllm_spec_decode_num_draft_tokens": (
        "Drafts that were really proposed",
        ("totals", "speculation", "num_drafted_tokens"),
    ),
    "trtllm_spec_decode_num_accepted_tokens": (
        "Drafts that were accepted",
        ("totals", "speculation", "num_accepted_tokens"),
    ),
}
BY_POSITION = {
    "trtllm_spec_decode_drafted_tokens": (
        "Drafts proposed at a position from 0",
        "per_position_drafted",
    ),
    "trtllm_spec_decode_accepted_tokens": (
        "Drafts accepted at a position from 0",
        "per_position_accepted",
    ),
}
BY_DRAFT_LEN = {
    "tllm_spec_rounds": ("Generation rounds", "rounds"),
    "tllm_spec_request_rounds": (
        "Generation rounds, once for each request in them",
        "request_rounds",
    ),
    "tllm_spec_emitted_tokens": ("Tokens of generation rounds", "emitted_tokens"),
    "tllm_spec_round_seconds": ("Time of generation rounds without prompts", "seconds"),
}


class EngineMetrics(Collector):
    """Asks for the engine's state each time that it is read."""

    def __init__(self, info: Callable[[], Mapping[str, Any]]) -> None:
        self._info = info
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """None beforehand: registering must not ask the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        state = self._info()["internal_states"][0]
        for name, (help_text, path) in GAUGES.items():
            yield GaugeMetricFamily(name, help_text, value=_at(state, path))
        for name, (help_text, path) in COUNTERS.items():
            yield CounterMetricFamily(name, help_text, value=_at(state, path))
        totals = state["totals"]
        yield from _requests(totals["requests_by_finish_reason"])
        yield from _speculation(totals)
        yield from _pages(state["kv_cache"], totals)


def _at(state: Any, path: tuple[str, ...]) -> float:
    for key in path:
        state = state[key]
    return float(state)


def _requests(by_reason: Mapping[str, int]) -> Iterator[Metric]:
    done = CounterMetricFamily(
        "trtllm_request_success", "Requests that were completed", labels=["finished_reason"]
    )
    failed = CounterMetricFamily(
        "tllm_spec_request_failure",
        "Requests that failed or were cancelled",
        labels=["finished_reason"],
    )
    for reason in (*SUCCESSES, *sorted(by_reason.keys() - set(SUCCESSES))):
        (done if reason in SUCCESSES else failed).add_metric([reason], by_reason.get(reason, 0))
    yield from (done, failed)


def _speculation(totals: Mapping[str, Any]) -> Iterator[Metric]:
    stats = totals["speculation"]
    for name, (help_text, key) in BY_POSITION.items():
        metric = CounterMetricFamily(name, help_text, labels=["token_position"])
        for position, number in enumerate(stats[key]):
            metric.add_metric([str(position)], number)
        yield metric
    if stats["rounds"]:
        help_text = (
            "Tokens emitted per round of a request since the start, the target's own included"
        )
        yield GaugeMetricFamily(
            "trtllm_spec_decode_acceptance_length", help_text, value=stats["acceptance_length"]
        )
    for name, (help_text, key) in BY_DRAFT_LEN.items():
        metric = CounterMetricFamily(name, help_text, labels=["draft_len"])
        for draft_len, row in totals["by_draft_len"].items():
            metric.add_metric([draft_len], row[key])
        yield metric


def _pages(cache: Mapping[str, Any], totals: Mapping[str, Any]) -> Iterator[Metric]:
    pages = GaugeMetricFamily(
        "tllm_spec_kv_cache_pages", "KV pages by where they are", labels=["place"]
    )
    for place in ("free", "used", "cached"):
        pages.add_metric([place], cache[place])
    yield pages
    share = "Share of the KV pages that requests hold"
    yield GaugeMetricFamily(
        "trtllm_kv_cache_utilization", share, value=cache["used"] / cache["num_pages"]
    )
    hits, prompts = totals["cached_prompt_tokens"], totals["prompt_tokens"]
    hit_rate = "Prompt tokens found in the cache / prompt tokens, since the start"
    yield GaugeMetricFamily(
        "trtllm_kv_cache_hit_rate", hit_rate, value=hits / prompts if prompts else 0.0
    )
