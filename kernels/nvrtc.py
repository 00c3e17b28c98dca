"""Compiles the CUDA C++ sources of these folders with NVRTC and launches them through cuda-python.

Compilation needs no GPU. A kernel is loaded into torch's current context and launched on the given
stream, so torch's graph capture records it.

cuda.core 1.2 would gain nothing: a launch takes as long, but it accepts no struct by value, and
each of these kernels has one struct as its argument."""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tllm_spec.kernels.disk_cache import cache_folder, write_file

ELF = b"\x7fELF"
SHARED_BYTES = 227 << 10  # per CTA, on Hopper and data center Blackwell


@functools.cache
def is_installed() -> bool:
    """Whether cuda-python is installed (the extra `cuda`)."""
    return (
        importlib.util.find_spec("cuda") is not None
        and importlib.util.find_spec("cuda.bindings") is not None
    )


@functools.cache
def why_unavailable(device: int) -> str | None:
    """Why our CUDA kernels cannot run on this device, or None."""
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 9:  # clusters and programmatic dependent launch
        return "it needs compute capability 9.0"
    # Older torch does not report it; assume a data center device, which has enough.
    if getattr(properties, "shared_memory_per_block_optin", SHARED_BYTES) < SHARED_BYTES:
        return f"it needs {SHARED_BYTES >> 10} KB of shared memory a block"
    return None if is_installed() else "cuda-python is not installed; pip install tllm_spec[cuda]"


def compile_source(
    name: str, architecture: str, definitions: tuple[tuple[str, int], ...] = ()
) -> bytes:
    """The machine code of file `name` of these folders, compiled once per machine.

    Args:
        name: such as `small_m_gemm.cu`.
        architecture: such as `sm_90`.
        definitions: macros and their values.

    Raises:
        RuntimeError: the source does not compile; the message contains the compiler's log.
    """
    from cuda.bindings import nvrtc

    folder = Path(__file__).parent
    paths = [*folder.rglob(name), *sorted(folder.rglob("*.cuh"))]
    texts = [(path.name, path.read_bytes()) for path in paths]
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        *(f"-D{key}={int(value)}" for key, value in definitions),
    ]
    asked = repr((texts, options, nvrtc.nvrtcVersion()[1:])).encode()
    path = cache_folder() / "cuda" / f"{name}-{hashlib.sha256(asked).hexdigest()}.cubin"
    with contextlib.suppress(OSError):
        cubin = path.read_bytes()
        if cubin.startswith(ELF):
            return cubin
    cubin = _compiled(texts, options)
    write_file(path, cubin)
    return cubin


def _compiled(texts: Sequence[tuple[str, bytes]], options: Sequence[str]) -> bytes:
    """Compiles the first text, which may include the others."""
    from cuda.bindings import nvrtc

    (name, source), *headers = texts
    contents, names = [text for _, text in headers], [name.encode() for name, _ in headers]
    program = checked(
        nvrtc.nvrtcCreateProgram(source, name.encode(), len(headers), contents, names)
    )
    (error,) = nvrtc.nvrtcCompileProgram(
        program, len(options), [option.encode() for option in options]
    )
    if error.value:
        log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{name} does not compile with {' '.join(options)}:\n{log.decode()}")
    cubin = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    checked(nvrtc.nvrtcDestroyProgram(program))
    return cubin


@dataclass(frozen=True)
class Launch:
    """Shape of a launch. grid: CTAs; block: threads per CTA; cluster: CTAs per cluster;
    shared_bytes: dynamic shared memory per CTA."""

    grid: int
    block: int
    cluster: int
    shared_bytes: int


class Kernel:
    """One loaded kernel."""

    def __init__(self, cubin: bytes, name: str, max_shared_bytes: int) -> None:
        from cuda.bindings import driver

        self._module = checked(driver.cuModuleLoadData(cubin))
        self._function = checked(driver.cuModuleGetFunction(self._module, name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(self._function, attribute, max_shared_bytes))

    def node_params(
        self,
        num_threads: int,
        values: tuple[Any, ...],
        types: tuple[type["ctypes._SimpleCData[Any]"], ...],
    ) -> Any:
        """Parameters of a CUDA graph node: one CTA of `num_threads` threads, the arguments and
        their C types."""
        from cuda.bindings import driver

        params = driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = self._function
        params.gridDimX = params.gridDimY = params.gridDimZ = 1
        params.blockDimX, params.blockDimY, params.blockDimZ = num_threads, 1, 1
        params.kernelParams = (values, types)
        return params

    def launch(self, launch: Launch, stream: int, argument: ctypes.Structure) -> None:
        """Launches the kernel with programmatic dependent launch: it may start before the previous
        kernel ends, and must itself wait before it touches what that one writes. argument: the
        kernel's only argument."""
        from cuda.bindings import driver

        config = _config(launch, stream)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        checked(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(arguments), 0))


def _config(launch: Launch, stream: int) -> Any:
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
    config.sharedMemBytes = launch.shared_bytes
    config.hStream = stream
    pdl, cluster = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
    pdl.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    pdl.value.programmaticStreamSerializationAllowed = 1
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = cluster.value.clusterDim
    size.x, size.y, size.z = launch.cluster, 1, 1
    config.attrs, config.numAttrs = [pdl, cluster], 2
    return config


def checked(result: tuple[Any, ...]) -> Any:
    """The result of a cuda-python call without its error code. Raises RuntimeError for an error."""
    error, *values = result
    if error.value:
        raise RuntimeError(f"{type(error).__name__}: {error.name}")
    return values[0] if values else None
