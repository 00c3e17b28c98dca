"""The network as a TensorRT engine on torch's stream and in torch's memory: which package serves a
device, how the engine is built, once for each set of weights, shapes and versions, and its runs."""

import functools
import hashlib
import logging
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from tllm_spec.draft_network.network import (
    ALIGNMENT,
    BATCH,
    CACHED,
    CACHED_ROWS,
    KV_ROWS,
    TOKEN_IDS,
    WINDOW,
    NetworkModel,
    StepNetwork,
    Tensors,
)
from tllm_spec.kernels.disk_cache import cache_folder, write_file
from tllm_spec.models.config import ModelConfig

logger = logging.getLogger(__name__)

# `tensorrt` needs a GPU to build, `tensorrt_rtx` builds for the GPUs that it lists.
PACKAGES = ("tensorrt", "tensorrt_rtx")
OLDEST = {"tensorrt": (10, 13), "tensorrt_rtx": (1, 2)}  # the first for CUDA 13; stream capture


@dataclass(frozen=True)
class TensorRTPackage:
    """`target`: of the builder, where the package lists compute capabilities; where it lists none,
    an engine is for the device that it is built on."""

    trt: Any
    target: Any | None
    device_name: str

    @property
    def name(self) -> str:
        return f"{self.trt.__name__} {self.trt.__version__}"


def find_tensorrt(device: torch.device) -> TensorRTPackage:
    """The first package that serves the device. Raises ValueError with all reasons in one
    sentence."""
    if device.type != "cuda":
        raise ValueError(f"it runs on CUDA, and device is {device.type!r}")
    capability = torch.cuda.get_device_capability(device)
    return package_for(capability, torch.cuda.get_device_name(device))


def package_for(capability: tuple[int, int], device_name: str) -> TensorRTPackage:
    """The same, for a compute capability."""
    reasons = []
    for name in PACKAGES:
        try:
            trt = import_module(name)
        except (ImportError, OSError) as error:
            reasons.append(f"{name} cannot be imported ({error})")
            continue
        if (reason := _why_not(trt, capability)) is None:
            return TensorRTPackage(trt, targets(trt).get(capability), device_name)
        reasons.append(reason)
    raise ValueError(f"{', and '.join(reasons)}; pip install tllm_spec[tensorrt]")


def targets(trt: Any) -> dict[tuple[int, int], Any]:
    """The compute capabilities that a package lists; `tensorrt` lists none."""
    names = getattr(getattr(trt, "ComputeCapability", None), "__members__", {})
    found = {name: re.fullmatch(r"SM(\d+)(\d)", name) for name in names}
    return {
        (int(match[1]), int(match[2])): names[name]
        for name, match in found.items()
        if match is not None
    }


def _why_not(trt: Any, capability: tuple[int, int]) -> str | None:
    package, oldest = f"{trt.__name__} {trt.__version__}", OLDEST[trt.__name__]
    if tuple(int(part) for part in trt.__version__.split(".")[:2]) < oldest:
        return f"{package} is older than {oldest[0]}.{oldest[1]}"
    served = targets(trt)
    if served and capability not in served:
        listed = ", ".join(f"{major}.{minor}" for major, minor in sorted(served))
        return (
            f"{package} has no target for compute capability {capability[0]}.{capability[1]} "
            f"(it has {listed})"
        )
    return None


@functools.cache
def trt_logger(trt: Any) -> Any:
    """Passes TensorRT's messages on. TensorRT takes one logger in a process."""
    levels = {
        trt.ILogger.VERBOSE: logging.DEBUG,
        trt.ILogger.INFO: logging.DEBUG,
        trt.ILogger.WARNING: logging.INFO,
        trt.ILogger.ERROR: logging.ERROR,
        trt.ILogger.INTERNAL_ERROR: logging.ERROR,
    }

    class Logger(trt.ILogger):  # type: ignore[misc] # TensorRT has no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            logger.log(levels[severity], "TensorRT: %s", message)

    return Logger()


_BATCH_STEP = 8

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


def engine_file(package: TensorRTPackage, network: StepNetwork, limits: EngineLimits) -> Path:
    """Where the engine of this graph, these weights, limits and versions is kept."""
    built_for = package.target or package.device_name
    digest = hashlib.sha256(repr((package.name, built_for, limits)).encode())
    digest.update(Path(__file__).read_bytes())
    digest.update(network.onnx_graph)
    for weight in network.weights.values():
        digest.update(weight.view(torch.uint8).numpy().data)
    return cache_folder() / "engines" / f"{digest.hexdigest()}.engine"


def load_or_build(
    package: TensorRTPackage, model: NetworkModel, limits: EngineLimits
) -> tuple[Any, Any]:
    """A runtime and its engine. Raises ValueError if TensorRT cannot build it."""
    network = StepNetwork.of(model)
    path = engine_file(package, network, limits)
    runtime = package.trt.Runtime(trt_logger(package.trt))
    if (kept := _kept(path)) is not None:
        engine = runtime.deserialize_cuda_engine(kept)
        if engine is not None:
            logger.info("%s: the draft model's engine was read from %s", package.name, path)
            return runtime, engine
        logger.warning("%s does not load, so the engine is built again", path)
    logger.info("%s: building the draft model's engine; this may take minutes", package.name)
    start, serialised = monotonic(), build(package, network, limits)
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


def build(package: TensorRTPackage, network: StepNetwork, limits: EngineLimits) -> Any:
    """The serialised engine, as an IHostMemory. Raises ValueError if TensorRT cannot build it."""
    trt = package.trt
    builder = trt.Builder(trt_logger(trt))
    definition, parser = define(package, builder, network)
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # float32 is torch's float32
    if package.target is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(package.target, 0)
    if package.trt.__name__ == "tensorrt_rtx":  # needed for CUDA graphs
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    most = max_kv_rows(network.config)
    kv_rows = limits.page_size, min(limits.max_cached, most), most
    for ranges in limits.profiles:
        profile, sizes = builder.create_optimization_profile(), {**ranges, KV_ROWS: kv_rows}
        for name, shape in network.inputs.items():
            # A dimension without a name has one size for minimum, optimum and maximum.
            sizes_of = [(size,) * 3 if isinstance(size, int) else sizes[size] for size in shape]
            profile.set_shape(name, *zip(*sizes_of, strict=True))
        config.add_optimization_profile(profile)
    serialised = builder.build_serialized_network(definition, config)
    del parser
    if serialised is None:
        raise ValueError(f"{package.name} cannot build the draft model's engine; see the log")
    return serialised


def max_kv_rows(config: ModelConfig) -> int:
    """Rows that a KV pool has at most: TensorRT limits a tensor's elements."""
    return int((2**31 - 1) // (config.num_kv_heads * config.head_dim))


def define(package: TensorRTPackage, builder: Any, network: StepNetwork) -> tuple[Any, Any]:
    """TensorRT's definition of the network, and the parser, which must live as long. Raises
    ValueError if the parser refuses it."""
    trt = package.trt
    is_typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    definition = builder.create_network(is_typed)
    parser = trt.OnnxParser(definition, trt_logger(trt))
    is_done = parser.load_model_proto(network.onnx_graph)
    for name, weight in network.weights.items():
        is_done = is_done and parser.load_initializer(name, weight.data_ptr(), weight.nbytes)
    if not (is_done and parser.parse_model_proto()):
        errors = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise ValueError(f"{package.name} cannot read the draft model's network: {errors}")
    return definition, parser


class TensorRTNetwork:
    """All execution contexts share one block of scratch memory: runs are in the order of torch's
    current stream. `loaded`: a runtime and its engine."""

    def __init__(
        self, trt: Any, loaded: tuple[Any, Any], limits: EngineLimits, device: torch.device
    ) -> None:
        self._trt = trt
        self._runtime, self._engine = loaded
        self._sizes = [profile[BATCH][2] for profile in limits.profiles[:-1]]
        self._max_window, self._device = limits.max_window, device
        size = self._engine.device_memory_size_v2
        self._scratch = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
        # On the default stream TensorRT would make the host wait.
        self._stream = torch.cuda.Stream(device)
        # Made before the pools take the memory that is left, and not in a round.
        self._shared = [self._context(profile) for profile in range(len(limits.profiles))]
        self._captured: dict[tuple[torch.Size, torch.Size], Any] = {}

    @functools.cached_property
    def may_be_captured(self) -> bool:
        """The network has no layer that waits for the host. `tensorrt_rtx` says whether a stream
        can be captured; `tensorrt` has no such question."""
        context, engine = self._context(0), self._engine
        if not hasattr(context, "is_stream_capturable"):
            return True
        for name in map(engine.get_tensor_name, range(engine.num_io_tensors)):
            if engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT:
                context.set_input_shape(name, engine.get_tensor_profile_shape(name, 0)[1])
        return bool(context.is_stream_capturable(self._stream.cuda_stream))

    def run(self, inputs: Tensors, outputs: Tensors) -> None:
        current = torch.cuda.current_stream(self._device)
        if current != torch.cuda.default_stream(self._device):
            _enqueue(self._own_context(inputs), inputs, outputs, current)
            return
        self._stream.wait_stream(current)
        shared = self._shared[self._profile(inputs[TOKEN_IDS].shape)]
        _enqueue(shared, inputs, outputs, self._stream)
        current.wait_stream(self._stream)

    def _own_context(self, inputs: Tensors) -> Any:
        """Other streams are those of captures. A graph holds memory of its context, so each shape
        has a context that never runs another one."""
        key = inputs[TOKEN_IDS].shape, inputs[CACHED_ROWS].shape
        if key not in self._captured:
            self._captured[key] = self._context(self._profile(key[0]))
        return self._captured[key]

    def _profile(self, shape: torch.Size) -> int:
        """For token ids of this shape. The last profile is that of prompts."""
        batch_size, width = shape
        if width > self._max_window:
            return len(self._sizes)
        return next(index for index, size in enumerate(self._sizes) if size >= batch_size)

    def _context(self, profile: int) -> Any:
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise torch.cuda.OutOfMemoryError("TensorRT makes no execution context; see the log")
        start = -(-self._scratch.data_ptr() // ALIGNMENT) * ALIGNMENT
        context.set_device_memory(start, self._engine.device_memory_size_v2)
        stream = self._stream.cuda_stream
        _check(context.set_optimization_profile_async(profile, stream), f"profile {profile}")
        self._stream.synchronize()
        return context


def _enqueue(context: Any, inputs: Tensors, outputs: Tensors, stream: torch.cuda.Stream) -> None:
    for name, tensor in inputs.items():
        shape = tuple(tensor.shape)
        if tuple(context.get_tensor_shape(name)) != shape:
            _check(context.set_input_shape(name, shape), name)
    for name, tensor in (*inputs.items(), *outputs.items()):
        assert tensor.is_contiguous()
        assert tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0
        _check(context.set_tensor_address(name, tensor.data_ptr()), name)
    _check(context.execute_async_v3(stream.cuda_stream), "the run")


def _check(is_done: bool, what: str) -> None:
    if not is_done:
        raise RuntimeError(f"TensorRT refuses {what} of the draft model's network; see the log")
