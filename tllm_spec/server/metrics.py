"""`/metrics` in Prometheus' text format, from `LLM.server_info`.

Names that start with `trtllm_` have the meaning that they have in TensorRT-LLM; those with
`tllm_spec_` have no counterpart there. Counters start at 0 with the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tllm_spec.outputs import FinishReason
from tllm_spec.server.histograms import HISTOGRAMS, Histograms
from tllm_spec.version import __version__

# Metrics under vLLM's names, for dashboards that were made for it (`--vllm_metrics`).


# By our name, without _total.
ALIASES: Mapping[str, str] = {
    "trtllm_num_requests_running": "num_requests_running",
    "trtllm_num_requests_waiting": "num_requests_waiting",
    "trtllm_kv_cache_utilization": "kv_cache_usage_perc",
    "trtllm_request_success": "request_success",
    "trtllm_time_to_first_token_seconds": "time_to_first_token_seconds",
    "trtllm_time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "trtllm_request_queue_time_seconds": "request_queue_time_seconds",
    "trtllm_e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "trtllm_spec_decode_num_draft_tokens": "spec_decode_num_draft_tokens",
    "trtllm_spec_decode_num_accepted_tokens": "spec_decode_num_accepted_tokens",
    "trtllm_spec_decode_accepted_tokens": "spec_decode_num_accepted_tokens_per_pos",
    "tllm_spec_kv_cache": "cache_config",
    "tllm_spec_lora_requests": "lora_requests",
    "tllm_spec_preemptions": "num_preemptions",
    "tllm_spec_prompt_tokens": "prompt_tokens",
    "tllm_spec_generated_tokens": "generation_tokens",
    "tllm_spec_prefix_hit_tokens": "prefix_cache_hits",
    "tllm_spec_request_prompt_tokens": "request_prompt_tokens",
    "tllm_spec_request_generation_tokens": "request_generation_tokens",
}
LABELS: Mapping[str, str] = {
    "token_position": "position",
    "page_size": "block_size",
    "num_pages": "num_gpu_blocks",
    "max_adapters": "max_lora",
    "running_adapters": "running_lora_adapters",
    "waiting_adapters": "waiting_lora_adapters",
}


def with_aliases(metrics: Iterable[Metric], model: str) -> Iterator[Metric]:
    """The metrics, and after each its alias, if there is one."""
    for metric in metrics:
        yield metric
        if alias := ALIASES.get(metric.name):
            renamed = Metric(f"vllm:{alias}", metric.documentation, metric.type)
            for sample in metric.samples:
                name = f"vllm:{alias}{sample.name.removeprefix(metric.name)}"
                labels = {LABELS.get(key, key): value for key, value in sample.labels.items()}
                renamed.add_sample(name, {**labels, "model_name": model}, sample.value)
            yield renamed


SUCCESSES = ("stop", "length")
FAILURES = tuple(sorted({*get_args(FinishReason)} - {*SUCCESSES}))

# By name: the help text, and the path in the engine's state.
Described = Mapping[str, tuple[str, tuple[str, ...]]]

GAUGES: Described = {
    "trtllm_num_requests_running": ("Running requests", ("num_requests_running",)),
    "trtllm_num_requests_waiting": (
        "Requests waiting for a slot or KV pages",
        ("num_requests_waiting",),
    ),
    "tllm_spec_draft_len": (
        "Current draft length for the latest batch size",
        ("speculative_num_steps",),
    ),
}
COUNTERS: Described = {
    "tllm_spec_preemptions": ("Preemptions of running requests", ("num_preemptions",)),
    "tllm_spec_prompt_tokens": ("Prompt tokens", ("totals", "prompt_tokens")),
    "tllm_spec_prefix_hit_tokens": (
        "Prompt tokens found in the prefix cache",
        ("totals", "cached_prompt_tokens"),
    ),
    "tllm_spec_generated_tokens": ("Generated tokens", ("totals", "generated_tokens")),
    "tllm_spec_draft_len_changes": (
        "Rounds whose draft length differs from the previous round's",
        ("totals", "draft_len_changes"),
    ),
    "tllm_spec_draft_len_switches": (
        "Changes of the draft length decided by the controller",
        ("controller", "decisions", "num_switches"),
    ),
    "trtllm_spec_decode_num_draft_tokens": (
        "Draft tokens proposed",
        ("totals", "speculation", "num_drafted_tokens"),
    ),
    "trtllm_spec_decode_num_accepted_tokens": (
        "Draft tokens accepted",
        ("totals", "speculation", "num_accepted_tokens"),
    ),
}
BY_REASON = {
    "trtllm_request_success": ("Completed requests", SUCCESSES),
    "tllm_spec_request_failure": ("Failed and cancelled requests", FAILURES),
}
BY_POSITION = {
    "trtllm_spec_decode_drafted_tokens": (
        "Draft tokens proposed, by position from 0",
        "per_position_drafted",
    ),
    "trtllm_spec_decode_accepted_tokens": (
        "Draft tokens accepted, by position from 0",
        "per_position_accepted",
    ),
}
BY_DRAFT_LEN = {
    "tllm_spec_rounds": ("Decode rounds", "rounds"),
    "tllm_spec_request_rounds": (
        "Decode rounds, counted once for each request in them",
        "request_rounds",
    ),
    "tllm_spec_emitted_tokens": ("Tokens emitted by decode rounds", "emitted_tokens"),
    "tllm_spec_round_seconds": ("Time of decode rounds without prompts", "seconds"),
}

BY_VERSION = {
    "tllm_spec_draft_version_rounds": (
        "Decode rounds of ended requests, by the version of the draft weights they began with",
        "rounds",
    ),
    "tllm_spec_draft_version_tokens": (
        "Tokens emitted by these rounds, bonus tokens included",
        "tokens",
    ),
}


class EngineMetrics(Collector):
    """Reads the engine's state for each scrape. vllm_model: the model's name, if vLLM's names are
    added. replica: a label of all samples, where other servers answer at the same address."""

    def __init__(
        self,
        info: Callable[[], Mapping[str, Any]],
        histograms: Histograms,
        vllm_model: str | None = None,
        replica: str | None = None,
    ) -> None:
        self._info = info
        self._histograms = histograms
        self._vllm_model, self._replica = vllm_model, replica
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Empty, so that registering does not read the engine's state."""
        return []

    def collect(self) -> Iterator[Metric]:
        states = self._info()["internal_states"]
        metrics: Iterable[Metric] = chain(_by_engine(states), self._of_requests())
        if self._vllm_model is not None:
            metrics = with_aliases(metrics, self._vllm_model)
        if self._replica is not None:
            metrics = (_labelled(metric, {"replica": self._replica}) for metric in metrics)
        yield from metrics

    def _of_requests(self) -> Iterator[Metric]:
        yield InfoMetricFamily("tllm_spec", "Version of the server", {"version": __version__})
        for name, found in self._histograms.read().items():
            names = [*map(str, map(float, found.bounds)), "+Inf"]
            buckets = list(zip(names, accumulate(found.counts), strict=True))
            yield HistogramMetricFamily(name, HISTOGRAMS[name][0], buckets, found.sum)


def _by_engine(states: Sequence[Mapping[str, Any]]) -> Iterable[Metric]:
    """The metrics of each state; of several engines with the label `engine`."""
    metrics: dict[str, Metric] = {}
    for state in states:
        for metric in _of_engine(state):
            if "engine" in state:
                _labelled(metric, {"engine": str(state["engine"])})
            same = metrics.setdefault(metric.name, metric)
            if same is not metric:
                same.samples += metric.samples
    return metrics.values()


def _labelled(metric: Metric, labels: Mapping[str, str]) -> Metric:
    """The same metric, whose samples have these labels, too."""
    metric.samples = [
        sample._replace(labels={**labels, **sample.labels}) for sample in metric.samples
    ]
    return metric


def _of_engine(state: Mapping[str, Any]) -> Iterator[Metric]:
    for name, (help_text, path) in GAUGES.items():
        yield GaugeMetricFamily(name, help_text, value=_at(state, path))
    for name, (help_text, path) in COUNTERS.items():
        yield CounterMetricFamily(name, help_text, value=_at(state, path))
    totals = state["totals"]
    yield from _requests(totals["requests_by_finish_reason"])
    yield from _speculation(totals)
    weights = state.get("draft_weights") or {"by_version": {}}  # where they cannot be swapped
    yield from _counters(BY_VERSION, "draft_version", weights["by_version"])
    yield from _pages(state["kv_cache"], totals)
    if (adapters := state.get("adapters")) is not None:
        names = {f"{key}_adapters": ",".join(adapters[key]) for key in ("running", "waiting")}
        labels = {"max_adapters": str(adapters["max"]), **names}
        yield InfoMetricFamily("tllm_spec_lora_requests", "LoRA adapters of requests", labels)


def _at(state: Any, path: tuple[str, ...]) -> float:
    for key in path:
        state = state[key]
    return float(state)


def _requests(by_reason: Mapping[str, int]) -> Iterator[Metric]:
    for name, (help_text, reasons) in BY_REASON.items():
        # All reasons from the start on: a rate needs the count before the first failure.
        rows = {reason: {name: by_reason.get(reason, 0)} for reason in reasons}
        yield from _counters({name: (help_text, name)}, "finished_reason", rows)


def _speculation(totals: Mapping[str, Any]) -> Iterator[Metric]:
    stats, keys = totals["speculation"], [key for _, key in BY_POSITION.values()]
    columns = zip(*(stats[key] for key in keys), strict=True)
    rows = {str(i): dict(zip(keys, column, strict=True)) for i, column in enumerate(columns)}
    yield from _counters(BY_POSITION, "token_position", rows)
    if stats["rounds"]:
        help_text = (
            "Tokens emitted per decode round of a request since the start, bonus token included"
        )
        yield GaugeMetricFamily(
            "trtllm_spec_decode_acceptance_length", help_text, value=stats["acceptance_length"]
        )
    yield from _counters(BY_DRAFT_LEN, "draft_len", totals["by_draft_len"])


def _counters(
    described: Mapping[str, tuple[str, str]], label: str, rows: Mapping[str, Mapping[str, float]]
) -> Iterator[Metric]:
    """described: the help text of each, and its key in a row. rows: by the label's value."""
    for name, (help_text, key) in described.items():
        metric = CounterMetricFamily(name, help_text, labels=[label])
        for value, row in rows.items():
            metric.add_metric([value], row[key])
        yield metric


def _pages(cache: Mapping[str, Any], totals: Mapping[str, Any]) -> Iterator[Metric]:
    pages = GaugeMetricFamily("tllm_spec_kv_cache_pages", "KV pages by state", labels=["place"])
    for place in ("free", "used", "cached"):
        pages.add_metric([place], cache[place])
    yield pages
    share = "Fraction of the KV pages held by requests"
    yield GaugeMetricFamily(
        "trtllm_kv_cache_utilization", share, value=cache["used"] / cache["num_pages"]
    )
    sizes = {"page_size": str(cache["page_size"]), "num_pages": str(cache["num_pages"])}
    yield InfoMetricFamily("tllm_spec_kv_cache", "Size of the KV cache", sizes)
    hits, prompts = totals["cached_prompt_tokens"], totals["prompt_tokens"]
    hit_rate = "Fraction of prompt tokens found in the prefix cache since the start"
    yield GaugeMetricFamily(
        "trtllm_kv_cache_hit_rate", hit_rate, value=hits / prompts if prompts else 0.0
    )
