"""All arguments of `LLM`, named as in TensorRT-LLM: from keywords, from a YAML file, or both.

Only options with an effect are fields. TensorRT-LLM's other options stand in `NOT_SERVED` with the
value that means "off"; anything else is refused. Nothing here looks at a checkpoint or a device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    Strict,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tllm_spec.config_base import ConfigError, ConfigModel
from tllm_spec.option_checks import NotServed, shown
from tllm_spec.speculative_config import PathText, SpeculativeConfig

NUMBERED = frozenset(
    {"adaptive", "draft_len_schedule"}
)  # options with keys of their own: batch sizes
ONE_GPU = "one device serves a model for now"
NO_STATISTICS = "iteration statistics are not served yet"
NO_BATCH_WAIT = "a round never waits for more requests"
LOCAL_FILES = "models are local folders; nothing is downloaded"

DEFAULT_LARGEST_GRAPH = 128  # requests, as in TensorRT-LLM

NOT_SERVED: Mapping[str, NotServed] = {
    "allreduce_strategy": NotServed(("AUTO",), ONE_GPU),
    "attn_backend": NotServed(
        ("auto", "VANILLA", "TRITON", "FLASHINFER"), "the other attention kernels are not served"
    ),
    "backend": NotServed((None, "pytorch"), "there is one backend"),
    "batch_wait_max_tokens_ratio": NotServed((0, 0.0), NO_BATCH_WAIT),
    "batch_wait_timeout_iters": NotServed((0,), NO_BATCH_WAIT),
    "batch_wait_timeout_ms": NotServed((0, 0.0), NO_BATCH_WAIT),
    "batched_logits_processor": NotServed((None,), "use SamplingParams.logits_processor"),
    "cache_transceiver_config": NotServed((None,), "prefill and decoding run in one place"),
    "checkpoint_format": NotServed((None, "HF"), "checkpoints have Hugging Face's format"),
    "checkpoint_loader": NotServed((None,), "checkpoints have Hugging Face's format"),
    "context_parallel_size": NotServed((1,), ONE_GPU),
    "enable_attention_dp": NotServed((False,), ONE_GPU),
    "enable_autotuner": NotServed(
        (True,),
        "on a GPU the first start measures which products are the fastest; deterministic uses none",
    ),
    "enable_early_first_token_response": NotServed((False,), "every round answers at once"),
    "enable_in_graph_sampling": NotServed((True, False), "sampling is part of the graph"),
    "enable_iter_perf_stats": NotServed((False,), NO_STATISTICS),
    "enable_iter_req_stats": NotServed((False,), NO_STATISTICS),
    "enable_lora": NotServed((False,), "LoRA is not served"),
    "garbage_collection_gen0_threshold": NotServed(
        (None,), "Python's garbage collector is left alone"
    ),
    "gather_generation_logits": NotServed((False,), "logits are not returned; logprobs are"),
    "generation_config": NotServed(("trtllm",), "sampling defaults come from SamplingParams only"),
    "guided_decoding_backend": NotServed((None,), "guided decoding is not served yet"),
    "kv_connector_config": NotServed((None,), "the KV cache stays in one process"),
    "lora_config": NotServed((None,), "LoRA is not served"),
    "max_beam_width": NotServed((None, 1), "there is no beam search"),
    "moe_cluster_parallel_size": NotServed((None, -1, 1), ONE_GPU),
    "moe_expert_parallel_size": NotServed((None, -1, 1), ONE_GPU),
    "moe_tensor_parallel_size": NotServed((None, -1, 1), ONE_GPU),
    "num_postprocess_workers": NotServed((0,), "text is made in the serving process"),
    "pipeline_parallel_size": NotServed((1,), ONE_GPU),
    "prefill_cuda_graph_backend": NotServed(("auto", "disabled"), "contexts are whole graphs"),
    "print_iter_log": NotServed((False,), NO_STATISTICS),
    "quant_config": NotServed((None,), "quantised weights are not served"),
    "reasoning_parser": NotServed((None,), "reasoning text is not split off"),
    "return_perf_metrics": NotServed((False,), "times are always in RequestOutput.metrics"),
    "revision": NotServed((None,), LOCAL_FILES),
    "sampler_type": NotServed(("auto", "TorchSampler"), "there is one sampler"),
    "tensor_parallel_size": NotServed((1,), ONE_GPU),
    "tokenizer_mode": NotServed(("auto",), "the tokenizer's fast form is the only one"),
    "tokenizer_revision": NotServed((None,), LOCAL_FILES),
    "torch_compile_config": NotServed((None,), "the model is not compiled"),
    "trust_remote_code": NotServed((False,), "code that comes with a checkpoint is never run"),
}
KV_CACHE_NOT_SERVED: Mapping[str, NotServed] = {
    "copy_on_partial_reuse": NotServed(
        (True,), "a partly matching page is always copied, never taken over"
    ),
    "dtype": NotServed(("auto",), "the cache has the model's own dtype"),
    "event_buffer_max_size": NotServed((0,), "cache events are not served"),
    "host_cache_size": NotServed((None, 0), "evicted pages are not kept in host memory"),
    "max_attention_window": NotServed((None,), "every layer keeps all tokens"),
    "max_gpu_total_bytes": NotServed((0,), "use max_tokens or free_gpu_memory_fraction"),
    "secondary_offload_min_priority": NotServed(
        (None,), "evicted pages are not kept in host memory"
    ),
    "sink_token_length": NotServed((None,), "every layer keeps all tokens"),
    "use_kv_cache_manager_v2": NotServed(("auto",), "there is one cache manager"),
    "use_uvm": NotServed((False,), "the cache lies in device memory"),
}
SCHEDULER_NOT_SERVED: Mapping[str, NotServed] = {
    "capacity_scheduler_policy": NotServed(
        ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION"), "requests join and leave in every round"
    ),
    "context_chunking_policy": NotServed(
        (None, "FIRST_COME_FIRST_SERVED"), "the oldest prompt's chunk comes first"
    ),
    "dynamic_batch_config": NotServed(
        (None,), "the batch is bounded by max_batch_size and max_num_tokens"
    ),
    "enable_prefix_aware_scheduling": NotServed(
        (False,), "requests are not reordered by their prefixes"
    ),
    "use_python_scheduler": NotServed((True, False), "the scheduler is always the Python one"),
}


class KvCacheConfig(ConfigModel):
    """The paged KV pool, bounded by `max_tokens` and a fraction of the device memory that is
    free."""

    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    max_tokens: PositiveInt | None = None
    free_gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    tokens_per_block: PositiveInt = 32

    not_served: ClassVar[Mapping[str, NotServed]] = KV_CACHE_NOT_SERVED

    @field_validator("tokens_per_block")
    @classmethod
    def _check_power_of_two(cls, tokens_per_block: int) -> int:
        if tokens_per_block & (tokens_per_block - 1):
            raise ValueError("must be a power of two")
        return tokens_per_block


class SchedulerConfig(ConfigModel):
    """Which requests run. Only `MAX_UTILIZATION` may pause a running request for want of pages."""

    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"] = (
        "GUARANTEED_NO_EVICT"
    )
    waiting_queue_policy: Literal["fcfs", "priority"] = "fcfs"

    not_served: ClassVar[Mapping[str, NotServed]] = SCHEDULER_NOT_SERVED


class CudaGraphConfig(ConfigModel):
    """For which batch sizes a generation round is captured as a CUDA graph. On a CPU it has no
    effect.

    `enable_padding` fills a batch up to the next captured size. It is True here and False in
    TensorRT-LLM: graphs are the fast path, and without padding a batch between two captured sizes
    leaves it. `max_batch_size` (None
    or 0: DEFAULT_LARGEST_GRAPH) is the largest of the sizes that are captured where `batch_sizes`
    names none."""

    batch_sizes: Annotated[tuple[PositiveInt, ...], Strict(False)] | None = None
    max_batch_size: NonNegativeInt | None = None
    enable_padding: bool = True

    not_served: ClassVar[Mapping[str, NotServed]] = {
        "mode": NotServed(("decode",), "contexts have prefill_cuda_graph_backend"),
    }

    @field_validator("batch_sizes")
    @classmethod
    def _sort_sizes(cls, sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if sizes is not None and not sizes:
            raise ValueError(
                "it has no entry; null means the default sizes, cuda_graph_config: null no graphs"
            )
        return None if sizes is None else tuple(sorted(set(sizes)))

    @model_validator(mode="after")
    def _check_largest(self) -> CudaGraphConfig:
        if self.batch_sizes and self.max_batch_size and self.max_batch_size != self.batch_sizes[-1]:
            raise ValueError(
                f"max_batch_size = {self.max_batch_size} contradicts batch_sizes = "
                f"{self.batch_sizes}; leave it "
                f"out, or give the largest of them, {self.batch_sizes[-1]}"
            )
        return self

    def sizes(self, limit: int, also: Iterable[int] = ()) -> tuple[int, ...]:
        """The batch sizes to capture, ascending.

        Args:
            limit: the most requests that a generation round can have; a larger size is captured as
            this one.
            also: further sizes, such as the keys of `draft_len_schedule`; those above the largest
            are left out.
        """
        assert limit > 0
        largest = self.max_batch_size or DEFAULT_LARGEST_GRAPH
        wanted = self.batch_sizes or _default_sizes(largest, self.enable_padding)
        sizes = {min(size, limit) for size in wanted}
        return tuple(sorted(sizes | {size for size in also if 0 < size < max(sizes)}))


def _default_sizes(largest: int, enable_padding: bool) -> list[int]:
    """TensorRT-LLM's batch sizes up to `largest`, which is always one of them.

    Padding needs small gaps only; without it every size that is not listed is lost, so that small
    ones all are."""
    if enable_padding:
        sizes = [1, 2, 4, *range(8, 129, 8), *range(192, largest, 64)]
    else:
        sizes = [*range(1, 32), *(2**power for power in range(5, largest.bit_length()))]
    return [*(size for size in sizes if size < largest), largest]


class LlmArgs(ConfigModel):
    """Everything that `LLM(model, **kwargs)` takes.

    `attn_backend`: `auto` is VANILLA on a CPU; on CUDA FLASHINFER where it can be had, else TRITON.
    `cuda_graph_config`: None runs without graphs. `prefill_cuda_graph_backend`: `auto` captures
    short contexts, too, where attention can be captured (FLASHINFER on Hopper).
    `deterministic`: kernels whose result for a token has the same bits whatever runs beside it, so
    that text (and log probabilities, to the last bit) cannot depend on batch, draft length, chunks,
    prefix hits or preemption. CUDA only."""

    model: PathText
    tokenizer: Any = None
    skip_tokenizer_init: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    attn_backend: Literal["auto", "VANILLA", "TRITON", "FLASHINFER"] = "auto"
    deterministic: bool = False

    max_batch_size: PositiveInt = 2048
    max_num_tokens: PositiveInt = 8192
    max_input_len: PositiveInt | None = None
    max_seq_len: PositiveInt | None = None
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    stream_interval: PositiveInt = 1

    kv_cache_config: KvCacheConfig = KvCacheConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    cuda_graph_config: CudaGraphConfig | None = CudaGraphConfig()
    prefill_cuda_graph_backend: Literal["auto", "disabled"] = "auto"
    speculative_config: SpeculativeConfig | None = None

    not_served: ClassVar[Mapping[str, NotServed]] = NOT_SERVED

    def __init__(self, /, **options: Any) -> None:
        _check_keys(options)
        super().__init__(**options)

    @field_validator("max_batch_size", "max_num_tokens", mode="before")
    @classmethod
    def _null_means_default(cls, value: object, info: ValidationInfo) -> object:
        return cls.model_fields[str(info.field_name)].default if value is None else value

    @field_validator("tokenizer")
    @classmethod
    def _check_tokenizer(cls, tokenizer: object) -> object:
        if isinstance(tokenizer, os.PathLike):
            return os.fspath(tokenizer)
        if tokenizer is None or isinstance(tokenizer, str) or hasattr(tokenizer, "decode"):
            return tokenizer
        raise ValueError("a folder or a transformers tokenizer is needed")

    @model_validator(mode="after")
    def _check_window_fits(self) -> LlmArgs:
        spec = self.speculative_config
        if spec is not None and spec.max_draft_len >= self.max_num_tokens:
            raise ValueError(
                f"max_num_tokens = {self.max_num_tokens} is too small: one request takes "
                f"max_draft_len + 1 = {spec.max_draft_len + 1} tokens of a round"
            )
        return self

    @model_validator(mode="after")
    def _check_deterministic(self) -> LlmArgs:
        if not self.deterministic:
            return self
        if self.attn_backend != "auto":
            raise ValueError(
                "deterministic has its own attention kernels: attn_backend must be 'auto', not "
                f"{self.attn_backend!r}"
            )
        if self.speculative_config is not None and self.speculative_config.use_rejection_sampling:
            raise ValueError(
                "deterministic and use_rejection_sampling exclude each other: its text depends on "
                "the drafts"
            )
        return self

    @classmethod
    def from_kwargs(cls, /, model: str | os.PathLike[str], **kwargs: Any) -> LlmArgs:
        """The arguments given by keyword; configuration objects may be given as plain mappings."""
        options: dict[str, Any] = {"model": model, **kwargs}
        return cls(**options)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], **kwargs: Any) -> LlmArgs:
        """The arguments of a YAML file laid over keyword arguments: where both speak, the file
        wins.

        Nested mappings are laid over each other key by key. Raises ValueError for a file that
        cannot be read."""
        return cls(**overlay(kwargs, read_yaml(path)))

    @property
    def why_no_overlap(self) -> str | None:
        """Why rounds do not overlap, or None. `disable_overlap_scheduler: false` means "where it is
        possible"."""
        if self.disable_overlap_scheduler:
            return "disable_overlap_scheduler is set"
        return self.speculative_config.why_no_overlap if self.speculative_config else None


def _check_keys(options: Mapping[str, Any], path: str = "") -> None:
    """Raises ConfigError for a nested key that is no option's name, as YAML and Python can
    write."""
    for name, value in options.items():
        if not isinstance(value, Mapping) or name in NUMBERED:
            continue
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ConfigError(
                [f"{path}{name} has the key {shown(wrong[0])}; names of options are needed"]
            )
        _check_keys(value, f"{path}{name}.")


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ValueError naming a file that is missing, broken or no
    mapping."""
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read the options file {os.fspath(path)}: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ValueError(f"the options file {os.fspath(path)} must hold a mapping of option names")
    return tree


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, mappings key by key."""
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        if isinstance(lower, Mapping) and isinstance(value, Mapping):
            value = overlay(lower, value)
        merged[key] = value
    return merged
