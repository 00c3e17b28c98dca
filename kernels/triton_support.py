"""Triton, where it is installed, and whether its kernels can run on a device."""

import functools
import importlib.util
import os
from typing import Any

import torch


class _NotInstalled:
    """Stands in for Triton, so that a file with kernels can be imported: what it decorates is
    never launched."""

    def __getattr__(self, name: str) -> "_NotInstalled":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else self


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _NotInstalled()


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton is installed and the device is CUDA, or the CPU with Triton's interpreter
    (TRITON_INTERPRET=1)."""
    runs = device.type == "cuda" or (
        device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    )
    return runs and importlib.util.find_spec("triton") is not None
