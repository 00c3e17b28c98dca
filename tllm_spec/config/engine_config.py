"""The options of the KV cache and its events, of CUDA graphs, of the scheduler and of LoRA."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, Strict, field_validator

from tllm_spec.config.config_base import ConfigModel, PathText, check
from tllm_spec.config.neighbours import (
    CUDA_GRAPH_IGNORED,
    CUDA_GRAPH_RENAMED,
    KV_CACHE_IGNORED,
    KV_CACHE_RENAMED,
    KV_EVENTS_IGNORED,
    SCHEDULER_IGNORED,
    Ignored,
    Renamed,
)
from tllm_spec.config.option_checks import ADAPTER_NAME, check_adapter_name

# The options of KV events, named as in vLLM.


NO_KV_EVENTS = "KV cache events are published by kv_cache_config.kv_events_config"
OWN_ADDRESS = re.compile(r"tcp://(\*|localhost|127\.[\d.]+|0\.0\.0\.0|\[::1?\]):\d+|ipc://.+")


class KVEventsConfig(ConfigModel):
    """Reports what enters and leaves the prefix cache over ZeroMQ, for routers. The events contain
    token ids of prompts."""

    enable_kv_cache_events: bool = True
    """false: as if the section were not there."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Where batches are published. `*`, a loopback address or `ipc://` is bound; any other address
    is connected to, as in vLLM. Engine i of `--dp_size` has the port plus i."""
    replay_endpoint: str | None = None
    """Where a subscriber asks for batches that it has missed; bound. null: nowhere."""
    buffer_steps: PositiveInt = 10_000
    """Batches that are kept for that."""
    topic: str = ""
    """First frame of each message, which subscribers may filter by."""
    data_parallel_rank: NonNegativeInt = 0
    """The engine's number in its batches."""
    publisher: Literal["zmq", "null"] = "zmq"
    """`null` publishes nothing: events go to the router of `--dp_size` only."""

    ignored: ClassVar[Ignored] = KV_EVENTS_IGNORED

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.fullmatch(r"tcp://.+:\d+|ipc://.+", endpoint):
            raise ValueError("tcp://ADDRESS:PORT or ipc://PATH is needed")
        return endpoint

    @property
    def binds(self) -> bool:
        return OWN_ADDRESS.fullmatch(self.endpoint) is not None

    def of_engine(self, number: int) -> KVEventsConfig:
        """The options of engine `number` of several."""
        replay = self.replay_endpoint
        changed = {
            "endpoint": _moved(self.endpoint, number),
            "replay_endpoint": None if replay is None else _moved(replay, number),
            "data_parallel_rank": self.data_parallel_rank + number,
        }
        return self.model_copy(update=changed)


def _moved(endpoint: str, number: int) -> str:
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_{number}" if number else endpoint
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + number}"


# The options of the KV cache, named as in TensorRT-LLM.


KVCacheType = Literal["auto", "fp8", "model"]
Share = Annotated[float, Field(gt=0, le=1)]
SHARES = frozenset(("free_gpu_memory_fraction", "gpu_memory_utilization", "mem_fraction_static"))


class KvCacheConfig(ConfigModel):
    """The paged KV cache and its prefix reuse."""

    enable_block_reuse: bool = True
    """Requests whose prompts begin alike share pages."""
    enable_partial_reuse: bool = True
    """A page of which only a part matches is copied and used up to there."""
    max_tokens: PositiveInt | None = None
    """Tokens that the cache holds, at most. null: no limit but the memory."""
    free_gpu_memory_fraction: Share = 0.9
    """Share that the cache may take of the GPU memory that is free after loading the models. No
    effect on a CPU."""
    gpu_memory_utilization: Share | None = None
    """Share of all memory of the GPU that the engine takes: weights, cache, activations and graphs.
    vLLM's, in place of `free_gpu_memory_fraction`. No effect on a CPU."""
    mem_fraction_static: Share | None = None
    """Share of all memory of the GPU that weights and cache take; activations and graphs must fit
    into the rest, or the cache is smaller. SGLang's, in place of `free_gpu_memory_fraction`. No
    effect on a CPU."""
    tokens_per_block: PositiveInt = 32
    """Tokens of one page, a power of two."""
    state_snapshot_tokens: PositiveInt = 1024
    """Models with recurrent states copy them after so many tokens of a prompt, and each multiple; a
    prefix is reused up to a copy. A multiple of `tokens_per_block`."""
    mamba_ssm_cache_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Type of recurrent states. `auto`: `float32`. With 16 bits a state is rounded after each token
    (after each block of a prompt's), so texts are other ones, whether or not there are drafts."""
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

    renamed: ClassVar[Mapping[str, Renamed]] = KV_CACHE_RENAMED
    ignored: ClassVar[Ignored] = KV_CACHE_IGNORED
    null_is_default: ClassVar[frozenset[str]] = frozenset(
        ("free_gpu_memory_fraction", "host_cache_size")
    )

    @property
    def share(self) -> float:
        """The one that is given, or the default of the first."""
        return (
            self.gpu_memory_utilization
            or self.mem_fraction_static
            or (self.free_gpu_memory_fraction)
        )

    @check
    def _check_share(self) -> Iterator[str]:
        given = {name: getattr(self, name) for name in sorted(SHARES & self.model_fields_set)}
        given = {name: share for name, share in given.items() if share is not None}
        if len(given) > 1:
            named = " and ".join(f"{name} = {share}" for name, share in given.items())
            yield f"{named} are exclusive: each says how large the cache is"

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


# For which batch sizes a decoding round is captured as a CUDA graph.


DEFAULT_LARGEST_GRAPH = 128  # requests, as in TensorRT-LLM


class CudaGraphConfig(ConfigModel):
    """Batch sizes for which a decoding round is captured as a CUDA graph. No effect on a CPU."""

    batch_sizes: Annotated[tuple[PositiveInt, ...], Strict(False)] | None = None
    """Batch sizes to capture. null: 1, 2, 4, then steps of 8 up to 128 and of 64 above; without
    padding 1 to 32 and powers of two."""
    max_batch_size: NonNegativeInt | None = None
    """Largest batch size to capture if `batch_sizes` is null. null or 0 is 128."""
    enable_padding: bool = True
    """A batch between two captured sizes runs as the next larger one. False, TensorRT-LLM's
    default, runs it without a graph."""

    ignored: ClassVar[Ignored] = CUDA_GRAPH_IGNORED
    renamed: ClassVar[Mapping[str, Renamed]] = CUDA_GRAPH_RENAMED

    @field_validator("batch_sizes")
    @classmethod
    def _sort_sizes(cls, sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if sizes is not None and not sizes:
            raise ValueError(
                "it has no entry; null means the default sizes, cuda_graph_config: null no graphs"
            )
        return None if sizes is None else tuple(sorted(set(sizes)))

    @check
    def _check_largest(self) -> Iterator[str]:
        if self.batch_sizes and self.max_batch_size and self.max_batch_size != self.batch_sizes[-1]:
            yield (
                f"max_batch_size = {self.max_batch_size} contradicts batch_sizes = "
                f"{self.batch_sizes}; leave it out, or give the largest of them, "
                f"{self.batch_sizes[-1]}"
            )

    def sizes(self, limit: int, also: Iterable[int] = ()) -> tuple[int, ...]:
        """The batch sizes to capture, ascending.

        limit: the most requests that a round can have; a larger size is captured as this one.
        also: further sizes, such as the keys of `draft_len_schedule`; those above the largest are
        left out."""
        assert limit > 0
        largest = self.max_batch_size or DEFAULT_LARGEST_GRAPH
        wanted = self.batch_sizes or _default_sizes(largest, self.enable_padding)
        sizes = {min(size, limit) for size in wanted}
        return tuple(sorted(sizes | {size for size in also if 0 < size < max(sizes)}))


def _default_sizes(largest: int, enable_padding: bool) -> list[int]:
    """TensorRT-LLM's batch sizes up to `largest`, which is always one of them. Without padding a
    size that is not listed has no graph, so all small sizes are listed."""
    if enable_padding:
        sizes = [1, 2, 4, *range(8, 129, 8), *range(192, largest, 64)]
    else:
        sizes = [*range(1, 32), *(2**power for power in range(5, largest.bit_length()))]
    return [*(size for size in sizes if size < largest), largest]


# Which requests run, and which wait: options of the scheduler.


class SchedulerConfig(ConfigModel):
    """Which requests run, and which wait."""

    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"] = (
        "GUARANTEED_NO_EVICT"
    )
    """GUARANTEED_NO_EVICT reserves pages for the full length of a request. MAX_UTILIZATION admits
    requests while there are pages, and pauses the youngest when pages run out."""
    waiting_queue_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of waiting requests: by their clients' turns and by arrival, or by their `priority`
    first."""
    fair_preemption: bool = False
    """Whether a client that has more running requests than another gives up its newest one, for one
    of the other's that waits; once in 64 rounds at most. Needs MAX_UTILIZATION."""

    ignored: ClassVar[Ignored] = SCHEDULER_IGNORED

    @check
    def _check_preemption(self) -> Iterator[str]:
        if self.fair_preemption and self.capacity_scheduler_policy != "MAX_UTILIZATION":
            yield (
                "fair_preemption = True needs capacity_scheduler_policy = MAX_UTILIZATION: under "
                "GUARANTEED_NO_EVICT a request that runs is never preempted"
            )

    @field_validator("capacity_scheduler_policy", mode="before")
    @classmethod
    def _value_of_enum(cls, policy: object) -> object:
        return policy.value if isinstance(policy, Enum) else policy


# LoRA adapters: options named as in TensorRT-LLM.


# TensorRT-LLM's names of linear layers.
TARGET_MODULES = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_dense": "o_proj",
    "mlp_h_to_4h": "gate_proj",
    "mlp_gate": "up_proj",
    "mlp_4h_to_h": "down_proj",
}


ENTRY_KEYS = {"name", "path"}, {"lora_name", "lora_path"}  # of vLLM's and SGLang's JSON


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, (str, os.PathLike)) else value


def _named_folders(given: object) -> object:
    """Folders by name, of folders, of `NAME=FOLDER` or of the neighbours' JSON."""
    entries = _as_tuple(given)
    if isinstance(given, Mapping):
        is_entry = any(keys <= {*given} for keys in ENTRY_KEYS)
        entries = (given,) if is_entry else tuple(given.items())
    if not isinstance(entries, Sequence):
        return given
    named: dict[object, object] = {}
    for each in entries:
        name, folder = each if isinstance(each, tuple) else _named_folder(each)
        check_adapter_name(name)
        if named.setdefault(name, folder) != folder:
            raise ValueError(f"two folders are named {name!r}; NAME=FOLDER names a folder")
    return named


def _named_folder(entry: object) -> tuple[object, object]:
    if isinstance(entry, Mapping):
        name, folder = (entry.get(key, entry.get(f"lora_{key}")) for key in ("name", "path"))
        return name, folder
    text = os.fspath(entry) if isinstance(entry, os.PathLike) else entry
    if not isinstance(text, str):
        return text, text
    name, equals, folder = text.partition("=")
    return (name, folder) if equals and ADAPTER_NAME.fullmatch(name) else (Path(text).name, text)


class LoraConfig(ConfigModel):
    """LoRA adapters of the target. Their memory is reserved at the start."""

    lora_dir: Annotated[Mapping[str, PathText], BeforeValidator(_named_folders)] = {}
    """Folders of adapters, in PEFT's format, that are loaded at the start, by name. In a list the
    name is the last part of the path, or that of `NAME=FOLDER`."""
    max_lora_rank: PositiveInt = 64
    """Largest rank of an adapter."""
    max_draft_lora_rank: PositiveInt | None = None
    """Largest rank of an adapter of the draft head, which an adapter's folder has in its sub-folder
    `draft`. An EAGLE-3 head takes them. null: drafts are those of the head as it is."""
    max_loras: Annotated[int, Field(ge=1, le=1024)] = 4
    """Adapters that one round may have, which are on the device. Requests with others wait, and the
    adapter that was not used for the longest time goes back to host memory."""
    max_cpu_loras: PositiveInt | None = None
    """Adapters that are loaded, at most; all of them are in host memory. One more takes the place
    of one that a request's own path or name has loaded and that is not in use. null: no limit, but
    with `--lora_auto_load` four times `max_loras`, and `max_loras` more than `lora_dir` at least.
    """
    lora_target_modules: Annotated[
        Annotated[tuple[str, ...], Strict(False)] | None, BeforeValidator(_as_tuple)
    ] = None
    """Layers that may have adapters, such as `q_proj`, or by TensorRT-LLM's names, such as
    `attn_q`. null: all linear layers."""

    @field_validator("lora_target_modules")
    @classmethod
    def _name_as_checkpoints_do(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if names is None or names in (("all",), ("all-linear",)):
            return None
        if not names:
            raise ValueError("it has no entry; null means all linear layers")
        return tuple(TARGET_MODULES.get(name, name) for name in names)

    @check
    def _check_numbers(self) -> Iterator[str]:
        most = self.max_cpu_loras
        if most is not None and most < max(self.max_loras, len(self.lora_dir)):
            yield (
                f"max_cpu_loras = {most} must be at least max_loras = {self.max_loras} and the "
                f"{len(self.lora_dir)} folders of lora_dir: host memory has every loaded adapter"
            )
