"""Programmatic dependent launch of our Triton kernels: a kernel is set up while the one before it
still runs, and waits for its end in its first statement. In a CUDA graph of many short kernels that
hides most of a launch.

It changes no result. Every kernel that takes part begins with `begin`
(programmatic_launch_triton.py), which waits before anything is read or written and lets the next
kernel be set up. Kernels that know nothing of it wait as ever.

A launch in which no program waits would let the next one run before the one in front of it has
ended.

Window attention reads lengths before it waits, and the CUDA one tables and the keys and values of
earlier tokens, too. That is safe where all of these were written before a projection in front of it
began to work: small_m_gemm.cu waits before it lets the next kernel be set up, and kernels of
libraries are not launched early. Between the two only such kernels may stand as write nothing of
that: rotary_write.py's writes other requests' slots."""

import functools
from typing import Any

import torch


@functools.cache
def programmatic_launch(device: torch.device) -> dict[str, Any]:
    """What a launch passes: the kernel's constant EARLY, and Triton's own option where the device
    has it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
