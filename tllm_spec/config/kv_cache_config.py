"""The options of the KV cache, named as in TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from tllm_spec.config.config_base import ConfigModel, check
from tllm_spec.config.kv_events_config import KVEventsConfig
from tllm_spec.config.neighbours import KV_CACHE_IGNORED, Ignored

FRACTION = "free_gpu_memory_fraction"
KVCacheType = Literal["auto", "fp8", "model"]


class KvCacheConfig(ConfigModel):
    """The paged KV cache and its prefix reuse."""

    enable_block_reuse: bool = True
    """Requests whose prompts begin alike share pages."""
    enable_partial_reuse: bool = True
    """A page of which only a part matches is copied and used up to there."""
    max_tokens: PositiveInt | None = None
    """Tokens that the cache holds, at most. null: no limit but the memory."""
    free_gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share that the cache may take of the GPU memory that is free after loading the models. No
    effect on a CPU."""
    tokens_per_block: PositiveInt = 32
    """Tokens of one page, a power of two."""
    state_snapshot_tokens: PositiveInt = 1024
    """Models with recurrent states copy them after so many tokens of a prompt, and each multiple; a
    prefix is reused up to a copy. A multiple of `tokens_per_block`."""
    dtype: KVCacheType = "auto"
    """Type of keys, values and MLA's latents. `fp8` (E4M3) takes half of 16 bits, with the
    checkpoint's scales or 1.0. `model`: the model's own type. `auto`: `fp8` where the checkpoint
    asks for it, otherwise `model`. See `docs/quantization.md`."""

    host_cache_size: NonNegativeInt = 0
    """Bytes of host memory, on each rank, for pages that are evicted from the device; pinned on
    CUDA. They come back when a prompt begins with them. Only where every layer keeps all keys."""
    kv_events_config: KVEventsConfig | None = None
    """Events of the prefix cache for routers, in vLLM's form. null: none. See
    `docs/deploying.md`."""

    ignored: ClassVar[Ignored] = KV_CACHE_IGNORED

    @field_validator("free_gpu_memory_fraction", mode="before")
    @classmethod
    def _null_means_default(cls, fraction: object) -> object:
        return cls.model_fields[FRACTION].default if fraction is None else fraction

    @field_validator("host_cache_size", mode="before")
    @classmethod
    def _null_means_none(cls, size: object) -> object:
        return 0 if size is None else size

    @check
    def _check_host_cache(self) -> Iterator[str]:
        if self.host_cache_size and not self.enable_block_reuse:
            yield (
                f"host_cache_size = {self.host_cache_size} keeps pages for reuse and "
                "enable_block_reuse is false: leave one of them out"
            )

    @field_validator("tokens_per_block")
    @classmethod
    def _check_power_of_two(cls, tokens_per_block: int) -> int:
        if tokens_per_block & (tokens_per_block - 1):
            raise ValueError("must be a power of two")
        return tokens_per_block
