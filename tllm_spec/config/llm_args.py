"""All arguments of `LLM`, named as in TensorRT-LLM: from keywords, from a YAML file, or both.

Only options with an effect are fields. `neighbours.py` has what others call them. No checkpoint and
no device is looked at here.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveInt, ValidationInfo, field_validator

from tllm_spec.config.config_base import ConfigModel, PathText, check, check_keys
from tllm_spec.config.engine_config import CudaGraphConfig as CudaGraphConfig
from tllm_spec.config.engine_config import KvCacheConfig as KvCacheConfig
from tllm_spec.config.engine_config import LoraConfig, SchedulerConfig
from tllm_spec.config.neighbours import (
    AUTO,
    LLM_IGNORED,
    LLM_RENAMED,
    OTHER_ATTENTION,
    Ignored,
    Renamed,
)
from tllm_spec.config.option_checks import PROCESSED, LogprobsMode, import_also_from, read_yaml
from tllm_spec.config.speculative_config import (
    DecodingBaseConfig,
    MTPDecodingConfig,
    SpeculativeConfig,
)

logger = logging.getLogger(__name__)

MAX_DETERMINISTIC_RANKS = 2  # a sum of two is the same in any order
# Options of `speculative_config` that may be import paths.
CODE = ("drafter", "resource_manager")


def _device_name(device: object) -> object:
    if not isinstance(device, str) or re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is None:
        raise ValueError("'auto', 'cpu', 'cuda' or 'cuda:N' is needed")
    return device


class LlmArgs(ConfigModel):
    """Everything that `LLM(model, **kwargs)` takes."""

    model: PathText
    """A local folder in Hugging Face's format, a GGUF file, or a zoo name such as `zoo:llama`."""
    tokenizer: Any = None
    """Folder or GGUF file of the tokenizer, or a transformers tokenizer. null: the model's."""
    skip_tokenizer_init: bool = False
    """No tokenizer: prompts are token ids, and outputs have no text."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations. `auto`: the checkpoint's on CUDA, float32 on a CPU."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` fills the weights with random numbers."""
    language_model_only: bool = False
    """Serves the text part of a model that also sees images (`…ForConditionalGeneration`), which is
    refused otherwise. No effect on other models."""
    device: Annotated[str, BeforeValidator(_device_name)] = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`. `auto`: CUDA where torch sees a device."""
    attn_backend: Literal["auto", "VANILLA", "TRITON", "FLASHINFER"] = "auto"
    """Attention kernels. `auto`: VANILLA (plain torch) on a CPU; on CUDA FLASHINFER, which is
    TRITON with FlashInfer's prefill, or TRITON without the package or in float32, and for layers
    whose prompts FlashInfer is not known to run faster: 256 elements a head, and windows with
    sinks (gpt-oss). Layers with latent attention (MLA) and those that attend within chunks (Llama
    4) run TRITON. `TRTLLM`, `FA3` and other kernels of others are taken as `auto`."""
    deterministic: bool = False
    """Batch-invariant kernels: text and log probabilities do not depend on batch, draft length,
    prompt chunks, prefix hits or preemption. Slower; CUDA only; on two devices at most."""
    fp8_activations: bool = True
    """Whether activations are quantised to FP8 where a checkpoint with FP8 weights asks for it.
    `false`: only its weights are in FP8."""

    enable_sleep_mode: bool = False
    """On CUDA: `LLM.sleep` frees the memory of weights and KV cache, which lie in memory of the
    driver for it. On a CPU `LLM.sleep` needs no option."""

    max_batch_size: Annotated[PositiveInt, Field(le=1 << 16)] = 2048
    """Requests that decode together, at most."""
    max_num_tokens: Annotated[PositiveInt, Field(le=1 << 20)] = 8192
    """Tokens of one forward, at most. A request with K drafts takes K + 1."""
    max_input_len: PositiveInt | None = None
    """Longest prompt that is accepted, in tokens. null: `max_seq_len` is the only limit."""
    max_seq_len: Annotated[int, Field(ge=2)] | None = None
    """Prompt and output of a request together, in tokens, at most. null: the model's."""
    enable_chunked_prefill: bool = False
    """Long prompts are prefilled in pieces, while other requests decode."""
    disable_overlap_scheduler: bool = False
    """The host reads each round before it launches the next. False overlaps where the decoding type
    allows it."""
    stream_interval: PositiveInt = 1
    """Tokens between two pieces of a streamed output, at least."""
    return_perf_metrics: bool = False
    """Accepted and without effect on `LLM`: `RequestOutput.metrics` always has the times of a
    request, `RequestOutput.speculative_decoding` its draft counts."""
    enable_iter_perf_stats: bool = False
    """Collects statistics of every round for `LLM.get_stats()`."""
    max_stats_len: PositiveInt = 1000
    """Rounds that `LLM.get_stats()` remembers; the oldest are dropped."""
    print_iter_log: bool = False
    """Logs one line for each round, at level INFO."""

    record_traffic: PathText | None = None
    """Folder in which requests and outputs are recorded for `tllm-bench replay`. null: nothing is
    recorded."""
    record_traffic_mib: PositiveInt = 1024
    """Size of that folder, in MiB, at most; the oldest records are dropped."""

    record_hidden_states: Annotated[float, Field(ge=0, le=1)] = 0.0
    """For this share of the recorded requests, the target's hidden states are recorded, too, for
    training and replaying draft heads. They have half of the folder's size at most."""

    tensor_parallel_size: PositiveInt = 1
    """Devices that share the model, a process for each. `mpirun -n N` starts them, or else the
    model does."""
    moe_expert_parallel_size: PositiveInt | None = None
    """Expert parallelism: the number of parts that those devices and the experts of each layer are
    divided into; the devices of a part slice its experts. null: 1."""
    moe_tensor_parallel_size: PositiveInt | None = None
    """Devices that share an expert. null: `tensor_parallel_size` / `moe_expert_parallel_size`."""
    gpus_per_node: PositiveInt | None = None
    """Devices of one host, which its ranks use in turn. null: as many as torch sees."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """What `logprobs` has where a request does not say it: `raw_logprobs` and `raw_logits` of the
    model itself, `processed_logprobs` and `processed_logits` after all that changes what is chosen.
    """
    guided_decoding_backend: Literal["xgrammar", "llguidance", "guidance"] | None = "llguidance"
    """`guided_decoding` is llguidance's under each of these names. null refuses such requests."""

    reasoning_parser: str | None = None
    """How the model marks its reasoning: a name such as `qwen3`, or `auto`. Grammars then begin
    after it, and it may have a `thinking_token_budget`. null: texts have no reasoning."""
    enable_in_reasoning: bool = False
    """Grammars begin at the first token, also with `reasoning_parser`."""

    kv_cache_config: KvCacheConfig = KvCacheConfig()
    """The paged KV cache."""
    scheduler_config: SchedulerConfig = SchedulerConfig()
    """Which requests run, and which wait."""
    cuda_graph_config: CudaGraphConfig | None = CudaGraphConfig()
    """CUDA graphs of decoding rounds. null: none."""
    prefill_cuda_graph_backend: Literal["auto", "disabled"] = "auto"
    """`auto` captures the prefill of short prompts, too, where attention can be captured
    (FLASHINFER on Hopper)."""
    lora_config: LoraConfig | None = None
    """LoRA adapters, which requests choose by name. null: none are served."""
    speculative_config: SpeculativeConfig | None = None
    """How drafts are made. null: plain decoding. `auto`: as `decoding_type: AUTO`."""

    renamed: ClassVar[Mapping[str, Renamed]] = LLM_RENAMED
    ignored: ClassVar[Ignored] = LLM_IGNORED

    def __init__(self, /, **options: Any) -> None:
        check_keys(options)
        super().__init__(**options)

    @classmethod
    def with_our_names(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        if str(options.get("speculative_config")).upper() == AUTO:
            options = {**options, "speculative_config": {"decoding_type": AUTO}}
        return super().with_our_names(options)

    @field_validator("max_batch_size", "max_num_tokens", mode="before")
    @classmethod
    def _null_means_default(cls, value: object, info: ValidationInfo) -> object:
        return cls.model_fields[str(info.field_name)].default if value is None else value

    @field_validator("moe_expert_parallel_size", "moe_tensor_parallel_size", mode="before")
    @classmethod
    def _minus_one_means_default(cls, value: object) -> object:
        return None if value == -1 else value

    @field_validator("guided_decoding_backend", mode="before")
    @classmethod
    def _name_the_grammar_compiler(cls, name: object) -> object:
        if name in ("outlines", "lm-format-enforcer"):
            raise ValueError(
                "'llguidance' is needed, which takes the same JSON schemas, patterns, choices and "
                "grammars"
            )
        return "llguidance" if name == "auto" else name

    @field_validator("attn_backend", mode="before")
    @classmethod
    def _name_kernels_of_others(cls, name: object) -> object:
        if not isinstance(name, str) or name not in OTHER_ATTENTION:
            return name
        logger.info("attn_backend = %r is taken as 'auto': its kernels are not part of this", name)
        return "auto"

    @field_validator("tokenizer")
    @classmethod
    def _check_tokenizer(cls, tokenizer: object) -> object:
        if isinstance(tokenizer, os.PathLike):
            return os.fspath(tokenizer)
        if tokenizer is None or isinstance(tokenizer, str) or hasattr(tokenizer, "decode"):
            return tokenizer
        raise ValueError("a folder or a transformers tokenizer is needed")

    @field_validator("speculative_config")
    @classmethod
    def _know_the_targets_own_modules(
        cls, config: DecodingBaseConfig | None, info: ValidationInfo
    ) -> DecodingBaseConfig | None:
        """MTP modules of the target's own folder are those of `speculative_model: null`."""
        folder = getattr(config, "speculative_model", None)
        model = info.data.get("model")
        if not isinstance(config, MTPDecodingConfig) or None in (folder, model):
            return config
        is_own = os.path.realpath(str(folder)) == os.path.realpath(str(model))
        return config.model_copy(update={"speculative_model": None}) if is_own else config

    @check
    def _check_window_fits(self) -> Iterator[str]:
        """Refuses drafts that no round could verify, instead of making shorter ones."""
        spec = self.speculative_config
        if spec is not None and spec.shapes.longest.window > self.max_num_tokens:
            longest = spec.shapes.longest
            drafts = f"the draft tree {longest.name}" if longest.is_tree else "max_draft_len"
            yield (
                f"max_num_tokens = {self.max_num_tokens} is too small: one request takes "
                f"{drafts} + 1 = {longest.window} tokens of a round"
            )

    @check
    def _check_logprobs_mode(self) -> Iterator[str]:
        if problem := self.why_no_logprobs(self.logprobs_mode):
            yield problem

    @check
    def _check_recording(self) -> Iterator[str]:
        if self.record_hidden_states and self.record_traffic is None:
            yield (
                f"record_hidden_states = {self.record_hidden_states} needs record_traffic, the "
                "folder that they go to"
            )

    @check
    def _check_ranks(self) -> Iterator[str]:
        size, parts = self.tensor_parallel_size, self.ep_size
        if parts * (self.moe_tensor_parallel_size or size // parts) != size:
            yield (
                f"moe_expert_parallel_size = {self.moe_expert_parallel_size} times "
                f"moe_tensor_parallel_size = {self.moe_tensor_parallel_size} must be "
                f"tensor_parallel_size = {size}"
            )
        if size == 1:
            return
        if self.device.startswith("cuda:"):
            yield (
                f"device = {self.device!r} is one device and tensor_parallel_size = {size} needs "
                "more; 'cuda' is accepted, and CUDA_VISIBLE_DEVICES chooses"
            )
        if self.tokenizer is not None and not isinstance(self.tokenizer, str):
            yield (
                f"tensor_parallel_size = {size}: the other processes cannot "
                "get a tokenizer object; a folder is accepted"
            )
        spec = self.speculative_config
        if spec is not None and spec.runs_users_code:
            yield (
                f"tensor_parallel_size = {size} is not served with "
                f"{spec.decoding_type}: its code might draft differently in each process"
            )

    @check
    def _check_deterministic(self) -> Iterator[str]:
        if not self.deterministic:
            return
        if self.attn_backend != "auto":
            yield (
                "deterministic has its own attention kernels: attn_backend must be 'auto', not "
                f"{self.attn_backend!r}"
            )
        if self.speculative_config is not None and self.speculative_config.use_rejection_sampling:
            yield (
                "deterministic and use_rejection_sampling exclude each other: with the latter, "
                "text depends on the drafts"
            )
        if self.tensor_parallel_size > MAX_DETERMINISTIC_RANKS:
            yield (
                f"deterministic is served with tensor_parallel_size up to "
                f"{MAX_DETERMINISTIC_RANKS}, not {self.tensor_parallel_size}: the order in which "
                "NCCL adds the values of more ranks depends on the size of the batch"
            )

    @classmethod
    def from_kwargs(cls, /, model: str | os.PathLike[str], **kwargs: Any) -> LlmArgs:
        """The arguments given by keyword; configuration objects may be given as mappings."""
        options: dict[str, Any] = {"model": model, **kwargs}
        return cls(**options)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], **kwargs: Any) -> LlmArgs:
        """The arguments of a YAML file laid over keyword arguments: where both have a key, the file
        wins. Nested mappings are merged key by key.

        Raises ValueError for a file that cannot be read."""
        return cls(**with_yaml(kwargs, path))

    @property
    def ep_size(self) -> int:
        """Parts that the experts are divided into."""
        expert, sliced = self.moe_expert_parallel_size, self.moe_tensor_parallel_size
        return expert or (1 if sliced is None else self.tensor_parallel_size // sliced)

    def why_no_logprobs(self, mode: LogprobsMode) -> str | None:
        """Why log probabilities of this mode cannot be returned, or None."""
        spec = self.speculative_config
        if mode not in PROCESSED or spec is None or spec.lossy_option is None:
            return None
        return (
            f"logprobs_mode = {mode!r} is refused with {spec.lossy_option}: tokens that it accepts "
            "were not drawn from these probabilities; raw_logprobs and raw_logits are accepted"
        )

    @property
    def why_no_overlap(self) -> str | None:
        """Why rounds do not overlap, or None."""
        if self.disable_overlap_scheduler:
            return "disable_overlap_scheduler is set"
        return self.speculative_config.why_no_overlap if self.speculative_config else None


def with_yaml(options: Mapping[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    """The options of a YAML file laid over others. Raises ValueError for a file that cannot be
    read."""
    return overlay(LlmArgs.with_our_names(options), read_options(path))


def read_options(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The options of a YAML file. If they name code by its import path, it may lie next to the
    file. Raises ValueError for a file that cannot be read."""
    options = LlmArgs.with_our_names(read_yaml(path))
    spec = options.get("speculative_config")
    if isinstance(spec, Mapping) and any(isinstance(spec.get(name), str) for name in CODE):
        import_also_from(path)
    return options


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, mappings key by key."""
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        if isinstance(lower, Mapping) and isinstance(value, Mapping):
            value = overlay(lower, value)
        merged[key] = value
    return merged
