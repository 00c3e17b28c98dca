"""tllm_spec: a speculative-decoding engine in the style of TensorRT-LLM's PyExecutor.

The names below are the public interface. Each is loaded at its first use, so that the command-line
tools start fast."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tllm_spec.version import __version__ as __version__

if TYPE_CHECKING:
    from tllm_spec.config.engine_config import KVEventsConfig as KVEventsConfig
    from tllm_spec.config.engine_config import LoraConfig as LoraConfig
    from tllm_spec.config.engine_config import SchedulerConfig as SchedulerConfig
    from tllm_spec.config.llm_args import CudaGraphConfig as CudaGraphConfig
    from tllm_spec.config.llm_args import KvCacheConfig as KvCacheConfig
    from tllm_spec.config.llm_args import LlmArgs as LlmArgs
    from tllm_spec.config.speculative_config import AutoDecodingConfig as AutoDecodingConfig
    from tllm_spec.config.speculative_config import DFlashDecodingConfig as DFlashDecodingConfig
    from tllm_spec.config.speculative_config import (
        DraftTargetDecodingConfig as DraftTargetDecodingConfig,
    )
    from tllm_spec.config.speculative_config import DSparkDecodingConfig as DSparkDecodingConfig
    from tllm_spec.config.speculative_config import Eagle3DecodingConfig as Eagle3DecodingConfig
    from tllm_spec.config.speculative_config import EagleDecodingConfig as EagleDecodingConfig
    from tllm_spec.config.speculative_config import MTPDecodingConfig as MTPDecodingConfig
    from tllm_spec.config.speculative_config import NGramDecodingConfig as NGramDecodingConfig
    from tllm_spec.config.speculative_config import PARDDecodingConfig as PARDDecodingConfig
    from tllm_spec.config.speculative_config import SADecodingConfig as SADecodingConfig
    from tllm_spec.config.speculative_config import SAEnhancerConfig as SAEnhancerConfig
    from tllm_spec.config.speculative_config import (
        UserProvidedDecodingConfig as UserProvidedDecodingConfig,
    )
    from tllm_spec.grammar.guided_decoding import GuidedDecodingParams as GuidedDecodingParams
    from tllm_spec.llm import LLM as LLM
    from tllm_spec.lora_request import LoRARequest as LoRARequest
    from tllm_spec.outputs import CompletionOutput as CompletionOutput
    from tllm_spec.outputs import RequestOutput as RequestOutput
    from tllm_spec.request_errors import RequestError as RequestError
    from tllm_spec.sampling_params import SamplingParams as SamplingParams
    from tllm_spec.text.chat_prompt import Conversation as Conversation

_HOME = {
    "LLM": "llm",
    "LlmArgs": "config.llm_args",
    "CudaGraphConfig": "config.llm_args",
    "KVEventsConfig": "config.engine_config",
    "KvCacheConfig": "config.llm_args",
    "LoRARequest": "lora_request",
    "LoraConfig": "config.engine_config",
    "SchedulerConfig": "config.engine_config",
    "SamplingParams": "sampling_params",
    "GuidedDecodingParams": "grammar.guided_decoding",
    "CompletionOutput": "outputs",
    "Conversation": "text.chat_prompt",
    "RequestError": "request_errors",
    "RequestOutput": "outputs",
    "AutoDecodingConfig": "config.speculative_config",
    "NGramDecodingConfig": "config.speculative_config",
    "SADecodingConfig": "config.speculative_config",
    "SAEnhancerConfig": "config.speculative_config",
    "DFlashDecodingConfig": "config.speculative_config",
    "DSparkDecodingConfig": "config.speculative_config",
    "DraftTargetDecodingConfig": "config.speculative_config",
    "Eagle3DecodingConfig": "config.speculative_config",
    "EagleDecodingConfig": "config.speculative_config",
    "MTPDecodingConfig": "config.speculative_config",
    "PARDDecodingConfig": "config.speculative_config",
    "UserProvidedDecodingConfig": "config.speculative_config",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tllm_spec' has no attribute {name!r}")
    return getattr(import_module(f"tllm_spec.{_HOME[name]}"), name)
