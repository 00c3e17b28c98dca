"""Metrics under vLLM's names, for dashboards that were made for it (`--vllm_metrics`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric

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
