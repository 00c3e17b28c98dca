"""TensorRT-LLM's `llmapi` names: `from tllm_spec.llmapi import LLM, KvCacheConfig`.

Every name of that module exists here. A class that is not served raises the sentence that its YAML
form is refused with, when it is called or one of its attributes is read. Nothing heavy is loaded
before a name needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

import tllm_spec
from tllm_spec.chat_formats.names import AUTO_REASONING, REASONING, name_of
from tllm_spec.config.neighbours import (
    ABSENT,
    CHAT_IGNORED,
    KV_CACHE_IGNORED,
    LLM_IGNORED,
    SCHEDULER_IGNORED,
    Ignored,
)
from tllm_spec.config.option_checks import is_ignored
from tllm_spec.config.option_checks import refusal as refusal_of_option
from tllm_spec.config.speculative_config import TYPES_NOT_SERVED, type_refusal
from tllm_spec.sampling_params import LogitsProcessor as LogitsProcessor
from tllm_spec.sampling_params import ThinkingBudgetLogitsProcessor as ThinkingBudgetLogitsProcessor

if TYPE_CHECKING:
    from tllm_spec import LLM as LLM
    from tllm_spec import AutoDecodingConfig as AutoDecodingConfig
    from tllm_spec import CompletionOutput as CompletionOutput
    from tllm_spec import CudaGraphConfig as CudaGraphConfig
    from tllm_spec import DraftTargetDecodingConfig as DraftTargetDecodingConfig
    from tllm_spec import Eagle3DecodingConfig as Eagle3DecodingConfig
    from tllm_spec import EagleDecodingConfig as EagleDecodingConfig
    from tllm_spec import GuidedDecodingParams as GuidedDecodingParams
    from tllm_spec import KvCacheConfig as KvCacheConfig
    from tllm_spec import KVEventsConfig as KVEventsConfig
    from tllm_spec import LlmArgs as LlmArgs
    from tllm_spec import LoraConfig as LoraConfig
    from tllm_spec import LoRARequest as LoRARequest
    from tllm_spec import MTPDecodingConfig as MTPDecodingConfig
    from tllm_spec import NGramDecodingConfig as NGramDecodingConfig
    from tllm_spec import RequestError as RequestError
    from tllm_spec import RequestOutput as RequestOutput
    from tllm_spec import SADecodingConfig as SADecodingConfig
    from tllm_spec import SAEnhancerConfig as SAEnhancerConfig
    from tllm_spec import SamplingParams as SamplingParams
    from tllm_spec import SchedulerConfig as SchedulerConfig
    from tllm_spec import UserProvidedDecodingConfig as UserProvidedDecodingConfig

    DecodeCudaGraphConfig = CudaGraphConfig
    TorchLlmArgs = LlmArgs


# Values of `capacity_scheduler_policy` and `context_chunking_policy` of `SchedulerConfig`, and of
# `LlmArgs.batching_type`, which say which are served.
ENUMS: Mapping[str, Sequence[str]] = {
    "CapacitySchedulerPolicy": ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"),
    "ContextChunkingPolicy": ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", "FORCE_CHUNK"),
    "BatchingType": ("INFLIGHT", "STATIC"),
}
# Names of TensorRT-LLM for classes of ours.
OTHER_NAMES: Mapping[str, str] = {
    "DecodeCudaGraphConfig": "CudaGraphConfig",
    "TorchLlmArgs": "LlmArgs",
}
# For each class that is not served, the option that takes it.
OPTION_OF: Mapping[str, str] = {
    "AttentionDpConfig": "attention_dp_config",
    "BatchedLogitsProcessor": "batched_logits_processor",
    "BlockReuseConfig": "block_reuse_config",
    "BuildCacheConfig": "enable_build_cache",
    "BuildConfig": "build_config",
    "CacheTransceiverConfig": "cache_transceiver_config",
    "CalibConfig": "calib_config",
    "ConversationParams": "conversation_params",
    "DeepSeekSparseAttentionConfig": "sparse_attention_config",
    "DeepSeekV4SparseAttentionConfig": "sparse_attention_config",
    "DisaggScheduleStyle": "disaggregated_params",
    "DisaggregatedParams": "disaggregated_params",
    "DynamicBatchConfig": "dynamic_batch_config",
    "ExtendedRuntimePerfKnobConfig": "extended_runtime_perf_knob_config",
    "KvCacheConnectorConfig": "kv_connector_config",
    "KvCacheRetentionConfig": "kv_cache_retention_config",
    "MambaStateConfig": "mamba_state_config",
    "MiniMaxM3SparseAttentionConfig": "sparse_attention_config",
    "MoeConfig": "moe_config",
    "MpiCommSession": "mpi_session",
    "MultimodalConfig": "multimodal_config",
    "PeftCacheConfig": "peft_cache_config",
    "PrefillCudaGraphBackend": "prefill_cuda_graph_backend",
    "PrometheusMetricsConfig": "prometheus_metrics_config",
    "QSASparseAttentionConfig": "sparse_attention_config",
    "QuantAlgo": "quant_config",
    "QuantConfig": "quant_config",
    "RayPlacementConfig": "ray_placement_config",
    "ReorderRequestPolicyConfig": "reorder_policy_config",
    "RocketSparseAttentionConfig": "sparse_attention_config",
    "SchedulingParams": "scheduling_params",
    "SkipSoftmaxAttentionConfig": "sparse_attention_config",
    "TorchCompileConfig": "torch_compile_config",
    "TriAttentionKvCacheCompressionConfig": "kv_cache_compression_config",
}
# Names that belong to no option, with the reason.
WITHOUT_OPTION: Mapping[str, str] = {
    "AsyncLLM": "LLM.generate_async serves asynchronous callers",
    "EncodeCudaGraphConfig": "there are no encoders",
    "EncodeExtraInputSpec": "there are no encoders",
    "MultimodalEncoder": ABSENT["multimodal"],
    "TrtLlmArgs": "there is one backend",
}
_TABLE: Ignored = {**LLM_IGNORED, **KV_CACHE_IGNORED, **SCHEDULER_IGNORED, **CHAT_IGNORED}
_TYPE_OF = {class_name: decoding_type for decoding_type, class_name in TYPES_NOT_SERVED.items()}
__all__ = sorted(
    {
        *tllm_spec.__all__,
        *ENUMS,
        "LogitsProcessor",
        "ThinkingBudgetLogitsProcessor",
        "add_thinking_budget_logits_processor",
        *OTHER_NAMES,
        *_TYPE_OF,
        *OPTION_OF,
        *WITHOUT_OPTION,
    }
)


def add_thinking_budget_logits_processor(
    sampling_params: SamplingParams,
    reasoning_parser: str | None = None,
    tokenizer: Any = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Gives `sampling_params` with a `thinking_token_budget` a processor with the markers of the
    parser, as the tokenizer writes them; other parameters stay as they are. The prompt says whether
    it has opened a section, whatever `chat_template_kwargs` are."""
    if sampling_params.thinking_token_budget in (None, -1):
        return
    name = name_of(reasoning_parser or "", AUTO_REASONING, tokenizer.chat_template or "")
    if name is None or (form := REASONING.get(name)) is None:
        raise ValueError(
            f"reasoning_parser = {reasoning_parser!r}: {', '.join(REASONING)} are known"
        )
    opener, closer = (
        tokenizer.encode(text, add_special_tokens=False) for text in (form.opener, form.closer)
    )
    own = ThinkingBudgetLogitsProcessor(sampling_params.thinking_token_budget, opener, closer)
    processors = [*sampling_params.logits_processors, own]
    object.__setattr__(sampling_params, "logits_processor", processors)


def refusal(name: str, use: str) -> str:
    """Why the class `name` is not served; `use` is what was tried, e.g. "MoeConfig()"."""
    if name in _TYPE_OF:
        return type_refusal(_TYPE_OF[name])
    if name in WITHOUT_OPTION:
        return f"{use} is refused: {WITHOUT_OPTION[name]}"
    return refusal_of_option(OPTION_OF[name], use, _TABLE.get(OPTION_OF[name], ()))


class _NotServedClass(type):
    """The type of the classes that are not served: they can be imported and named in annotations.
    A call returns its arguments as a mapping if the option takes them."""

    def __call__(cls, *args: object, **kwargs: object) -> dict[str, object]:
        option = OPTION_OF.get(cls.__name__)
        if option is not None and not args and is_ignored(kwargs, _TABLE.get(option, ())):
            return kwargs
        given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        raise ValueError(refusal(cls.__name__, f"{cls.__name__}({', '.join(given)})"))

    def __getattr__(cls, attribute: str) -> NoReturn:
        if attribute.startswith("_"):  # Python's own look-ups
            raise AttributeError(attribute)
        raise ValueError(refusal(cls.__name__, f"{cls.__name__}.{attribute}"))


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tllm_spec.llmapi' has no attribute {name!r}")
    if name in ENUMS:
        make: Any = Enum  # which mypy knows with literal names only
        found: Any = make(name, {each: each for each in ENUMS[name]}, type=str, module=__name__)
    elif name in _TYPE_OF or name in OPTION_OF or name in WITHOUT_OPTION:
        found = _NotServedClass(name, (), {"__module__": __name__})
    else:
        found = getattr(tllm_spec, OTHER_NAMES.get(name, name))
    globals()[name] = found  # so that a name is always the same object
    return found
