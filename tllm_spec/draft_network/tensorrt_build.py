"""Builds the network's TensorRT engine, once for each set of weights, shapes and versions: the
serialised engine is kept on disk."""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from tllm_spec.draft_network.decoder import BATCH, CACHED, KV_ROWS, WINDOW
from tllm_spec.draft_network.definition import NetworkModel, emit_network, weights_of
from tllm_spec.draft_network.tensorrt_emitter import TensorRTEmitter
from tllm_spec.draft_network.tensorrt_package import TensorRTPackage, trt_logger
from tllm_spec.kernels.disk_cache import cache_folder, write_file
from tllm_spec.models.config import ModelConfig

logger = logging.getLogger(__name__)

_BATCH_STEP = 8
_SOURCES = ("decoder.py", "head_decoder.py", "tensorrt_emitter.py", "tensorrt_build.py")

Range = tuple[int, int, int]  # minimum, the size to optimise for, maximum


@dataclass(frozen=True)
class EngineLimits:
    """What an engine is built for. max_window: tokens of each request in a batch; max_cached:
    entries before a window, a multiple of `page_size`."""

    max_batch_size: int
    max_window: int
    max_chunk: int
    max_cached: int
    page_size: int

    @property
    def profiles(self) -> list[dict[str, Range]]:
        """Ranges of the named dimensions, one set for each optimisation profile: windows of 1, up
        to 8, up to 64 requests and so on, and last a chunk of one prompt."""
        cached = (self.page_size, min(self.max_cached, max(1024, self.page_size)), self.max_cached)
        found, smallest = [], 1
        while smallest <= self.max_batch_size:
            size = 1 if smallest == 1 else (smallest - 1) * _BATCH_STEP
            size = min(size, self.max_batch_size)
            found.append({BATCH: (smallest, size, size), WINDOW: (1, 1, self.max_window)})
            smallest = size + 1
        found.append({BATCH: (1, 1, 1), WINDOW: (1, min(512, self.max_chunk), self.max_chunk)})
        return [profile | {CACHED: cached} for profile in found]


def engine_file(package: TensorRTPackage, model: NetworkModel, limits: EngineLimits) -> Path:
    """Where the engine of these weights, limits and versions is kept."""
    built_for = package.target or package.device_name
    facts = (package.name, built_for, model.config, model.dtype, limits)
    digest = hashlib.sha256(repr(facts).encode())
    for source in _SOURCES:
        digest.update(Path(__file__).with_name(source).read_bytes())
    for tensor in weights_of(model):
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return cache_folder() / "engines" / f"{digest.hexdigest()}.engine"


def load_or_build(
    package: TensorRTPackage, model: NetworkModel, limits: EngineLimits
) -> tuple[Any, Any]:
    """A runtime and its engine. Raises ValueError if TensorRT cannot build it."""
    path = engine_file(package, model, limits)
    runtime = package.trt.Runtime(trt_logger(package.trt))
    if (kept := _kept(path)) is not None:
        engine = runtime.deserialize_cuda_engine(kept)
        if engine is not None:
            logger.info("%s: the draft model's engine was read from %s", package.name, path)
            return runtime, engine
        logger.warning("%s does not load, so the engine is built again", path)
    logger.info("%s: building the draft model's engine; this may take minutes", package.name)
    start, serialised = monotonic(), build(package, model, limits)
    engine = runtime.deserialize_cuda_engine(serialised)
    if engine is None:
        raise ValueError(f"{package.name} cannot load the engine that it has built; see the log")
    write_file(path, bytes(serialised))
    logger.info("the engine took %.1f s", monotonic() - start)
    return runtime, engine


def _kept(path: Path) -> bytes | None:
    """The engine of an earlier start. None: there is none that can be read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        logger.warning("%s cannot be read (%s)", path, error.strerror)
        return None


def build(package: TensorRTPackage, model: NetworkModel, limits: EngineLimits) -> Any:
    """The serialised engine, as an IHostMemory. Raises ValueError if TensorRT cannot build it."""
    trt = package.trt
    builder = trt.Builder(trt_logger(trt))
    network, emitter = define(package, builder, model)
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # float32 is torch's float32
    if package.target is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(package.target, 0)
    if package.is_rtx:  # needed for CUDA graphs
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    most = max_kv_rows(model.config)
    kv_rows = limits.page_size, min(limits.max_cached, most), most
    for profile in limits.profiles:
        config.add_optimization_profile(_profile(builder, network, {**profile, KV_ROWS: kv_rows}))
    serialised = builder.build_serialized_network(network, config)
    del emitter  # kept the constants
    if serialised is None:
        raise ValueError(f"{package.name} cannot build the draft model's engine; see the log")
    return serialised


def max_kv_rows(config: ModelConfig) -> int:
    """Rows that a KV pool has at most: TensorRT limits a tensor's elements."""
    return int((2**31 - 1) // (config.num_kv_heads * config.head_dim))


def define(
    package: TensorRTPackage, builder: Any, model: NetworkModel
) -> tuple[Any, TensorRTEmitter]:
    """The network, and the emitter that must live as long."""
    is_typed = 1 << int(package.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(is_typed)
    emitter = TensorRTEmitter(package.trt, network)
    emit_network(emitter, model)
    return network, emitter


def _profile(builder: Any, network: Any, ranges: dict[str, Range]) -> Any:
    profile = builder.create_optimization_profile()
    for tensor in map(network.get_input, range(network.num_inputs)):
        names = [tensor.get_dimension_name(index) for index in range(len(tensor.shape))]
        shapes = [
            [
                size if name not in ranges else ranges[name][which]
                for name, size in zip(names, tensor.shape, strict=True)
            ]
            for which in range(3)
        ]
        profile.set_shape(tensor.name, *shapes)
    return profile
