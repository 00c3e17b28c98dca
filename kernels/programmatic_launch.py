"""Programmatic dependent launch (PDL) of our Triton kernels: a kernel is set up while the previous
one still runs, and waits for its end in its first statement. In a CUDA graph of many short kernels
this hides most of the launch latency. It does not change results.

Rules:

- `scaled_linear`'s kernels wait first, and then let the next kernel be set up. So does
  `fp8_linear`'s, which before fetches weights, that no kernel writes, into the L2 cache.
- Every other PDL kernel starts with `begin` (programmatic_launch_triton.py). It waits before
  anything is read or written, and lets the next kernel be set up. Kernels without PDL wait as
  usual.
- At least one program of a launch must wait. Otherwise the launch could end before the previous
  kernel, and the next kernel would not wait for that one.
- Window attention reads lengths before it waits. The CUDA version also reads block tables and the
  keys and values of earlier tokens. This is safe if they were written before the projection that
  precedes it began: small_m_gemm.cu and `scaled_linear` wait before they let the next kernel be set
  up, and library kernels are not launched with PDL. Kernels between the projection and the
  attention must not write that data (rotary_write.py writes the slots of other requests)."""

import functools
from typing import Any

import torch


@functools.cache
def programmatic_launch(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch: the kernel's constant PDL, Triton's option where the device
    supports it, and fused multiply-adds, for which Triton's default differs by release."""
    fusion = {"enable_fp_fusion": True}
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False, **fusion}
    return {"PDL": True, "launch_pdl": True, **fusion}
