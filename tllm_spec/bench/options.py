"""The options of the benchmark commands, turned into LLM arguments, requests and sampling.

The names are trtllm-bench's. None means that an option was not given.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tllm_spec.bench.dataset import BenchRequest, read_dataset
from tllm_spec.bench.runner import sampling_for
from tllm_spec.config.llm_args import KvCacheConfig, overlay, read_options
from tllm_spec.config.yaml_file import read_yaml
from tllm_spec.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options that become arguments of `LLM`. `llm_arguments` are already named and nested as
    those are."""

    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    max_input_len: int | None = None
    kv_cache_free_gpu_mem_fraction: float | None = None
    enable_chunked_context: bool = False
    scheduler_policy: str | None = None
    llm_arguments: Mapping[str, Any] = field(default_factory=dict)

    def sharing_memory(self, num_engines: int) -> "EngineOptions":
        """The same options for one of several engines on a device: each takes an equal part of the
        memory that a single one would take for its KV cache."""
        if self.kv_cache_free_gpu_mem_fraction is not None:
            return self
        one = KvCacheConfig().free_gpu_memory_fraction
        return replace(self, kv_cache_free_gpu_mem_fraction=one / num_engines)

    def arguments(self, yaml_path: Path | None) -> dict[str, Any]:
        """Keyword arguments of `LLM`, without the model. The file takes precedence over the
        options. Raises ValueError when the file names a model or cannot be read."""
        file = read_options(yaml_path) if yaml_path else {}
        if "model" in file:
            raise ValueError(
                f"model = {file['model']!r} in {yaml_path}: the command line names the model"
            )
        flags = given(
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_seq_len=self.max_seq_len,
            max_input_len=self.max_input_len,
            enable_chunked_prefill=self.enable_chunked_context or None,
            kv_cache_config=given(free_gpu_memory_fraction=self.kv_cache_free_gpu_mem_fraction),
            scheduler_config=given(capacity_scheduler_policy=self.scheduler_policy),
        )
        return overlay(overlay(self.llm_arguments, flags), file)


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Which requests are sent, and how they are sampled."""

    dataset: Path
    num_requests: int = 0
    target_output_len: int | None = None
    eos_id: int = -1
    sampler_options: Path | None = None

    def requests(self) -> list[BenchRequest]:
        requests = read_dataset(self.dataset, self.num_requests)
        if self.target_output_len is None:
            return requests
        return [replace(request, output_tokens=self.target_output_len) for request in requests]

    def sampling(self, requests: list[BenchRequest]) -> list[SamplingParams]:
        options = read_yaml(self.sampler_options) if self.sampler_options else None
        return sampling_for(requests, options, self.eos_id)


def split_options(
    options: Mapping[str, Any], llm_arguments: Mapping[str, Any]
) -> tuple[WorkloadOptions, EngineOptions]:
    """A command's options, separated."""
    workload = {each.name for each in fields(WorkloadOptions)}
    return (
        WorkloadOptions(**{name: options[name] for name in workload}),
        EngineOptions(
            **{name: options[name] for name in options.keys() - workload},
            llm_arguments=llm_arguments,
        ),
    )


def given(**options: Any) -> dict[str, Any]:
    """The options that have a value."""
    return {name: value for name, value in options.items() if value not in (None, {})}
