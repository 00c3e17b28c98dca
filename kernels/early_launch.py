"""Programmatic dependent launch of our Triton kernels: a kernel is set up while the one before it still runs, and
waits for its end in its first statement. In a CUDA graph of many short kernels that hides most of a launch.

It changes no result. Every kernel that takes part begins with `begin` (early_launch_triton.py), which waits before
anything is read or written and lets the next kernel be set up. Kernels that know nothing of it wait as ever.

A launch in which no program waits would let the next one run before the one in front of it has ended.

Window attention reads lengths before it waits. That is safe where they were written before the kernel in front of it
(the projection) began to work: few_row_linear.cu waits before it lets the next kernel be set up, and kernels of
libraries are not launched early.
"""

import functools
from typing import Any

import torch


@functools.cache
def early_launch(device: torch.device) -> dict[str, Any]:
    """What a launch passes: the kernel's constant EARLY, and Triton's own option where the device has it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
