"""Whether Triton kernels can run on a device."""

import functools
import importlib.util
import os

import torch


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton is installed and the device is CUDA, or the CPU with Triton's interpreter
    (TRITON_INTERPRET=1)."""
    runs = device.type == "cuda" or (
        device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    )
    return runs and importlib.util.find_spec("triton") is not None
