"""Finds a TensorRT package that serves a device, or says why there is none."""

import functools
import logging
import re
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

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

    @property
    def is_rtx(self) -> bool:
        return bool(self.trt.__name__ == "tensorrt_rtx")


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
