"""Whether our Triton kernels run for a device. Knows no kernel."""

import functools
import importlib.util
import os

import torch


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton is there for the device: CUDA, or its interpreter on the CPU
    (TRITON_INTERPRET=1)."""
    runs = device.type == "cuda" or (
        device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    )
    return runs and importlib.util.find_spec("triton") is not None
