"""Programmatic dependent launch (PDL) of our Triton kernels: a kernel is set up while the previous
one still runs, and waits for its end in its first statement. In a CUDA graph of many short kernels
this hides most of the launch latency. It does not change results.

Rules:

- `scaled_linear`'s kernels wait first, and then let the next kernel be set up. So does
  `fp8_linear`'s, which before fetches weights, that no kernel writes, into the L2 cache.
- `quantise_rows` of a few rows also waits first, and fetches the norm's weight before: the next
  GEMM fetches weights, which the previous one's would push out of the cache.
- So does `route_few`'s, which fetches the router's weights into registers. `grouped_gemm`'s waits
  first, too, but lets the next kernel be set up when its sums are done: programs of the next GEMM
  that came earlier would crowd on the few multiprocessors that have room by then, and the others
  would be idle while these multiply.
- `shrink_rows` reads matrices of adapters before it waits. The slot of a row, which says whose,
  it reads again when it has waited.
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

from tllm_spec.kernels.dispatch import tl, tl_cuda, triton

gdc_launch_dependents, gdc_wait = tl_cuda.gdc_launch_dependents, tl_cuda.gdc_wait


@functools.cache
def programmatic_launch(device: torch.device, num_warps: int | None = None) -> dict[str, Any]:
    """Keyword arguments of a launch: the kernel's constant PDL, Triton's option where the device
    supports it, fused multiply-adds, for which Triton's default differs by release, and the warps
    of a program."""
    own = {"enable_fp_fusion": True} | ({} if num_warps is None else {"num_warps": num_warps})
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False, **own}
    return {"PDL": True, "launch_pdl": True, **own}


def strided(*tensors: torch.Tensor | None) -> list[torch.Tensor | int | None]:
    """A kernel's arguments: each tensor, and its stride between rows; 0 for None."""
    return [each for x in tensors for each in (x, 0 if x is None else x.stride(0))]


# The first statement of a Triton kernel with programmatic dependent launch
# (programmatic_launch.py).


@triton.jit
def begin(PDL: tl.constexpr) -> None:
    """Let the next kernel be set up, and wait for the end of the previous one."""
    launch_dependents(PDL)
    wait_for_previous(PDL)


@triton.jit
def launch_dependents(PDL: tl.constexpr) -> None:
    """Let the next kernel be set up."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr) -> None:
    """Wait for the end of the previous kernel."""
    if PDL:
        gdc_wait()


@triton.jit
def fetch(pointers: tl.tensor) -> None:
    """Fetch the cache lines at these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


# How much shared memory a program may have on a device, how many stages of a pipeline fit, and
# which devices have tensor memory.
#
# Tilings are chosen by measurement on Hopper, whose programs may have 227 KiB. With less a
# pipeline has fewer stages, which changes no order of sums.


HOPPER_BYTES = 227 << 10
TENSOR_COLUMNS = 512  # of tensor memory
WEIGHT_COLUMNS = 64  # for dequantised weights


@functools.cache
def shared_memory_bytes(device: torch.device) -> int:
    """Bytes that a program may have on the device; on a CPU, as for the interpreter, Hopper's."""
    if device.type != "cuda":
        return HOPPER_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", HOPPER_BYTES))


@functools.cache
def has_tensor_memory(device: torch.device) -> bool:
    """Whether tensor cores keep sums in a memory of their own: data center Blackwell (10.x) and
    11.x."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (10, 11)


def rows_that_fit(rows: int, num_sums: int, device: torch.device) -> int:
    """Rows of a tile of weights that the kernel dequantises: `rows`, or half of them, and so on,
    until tensor memory has room. Each of the `num_sums` sums takes a column for each row."""
    if has_tensor_memory(device):
        while rows * num_sums + WEIGHT_COLUMNS > TENSOR_COLUMNS:
            rows //= 2
    return rows


def stages_that_fit(num_stages: int, stage_bytes: int, shared_bytes: int) -> int:
    """`num_stages` of a pipeline, or as many as fit. One stage is in registers and the others, of
    `stage_bytes` each, are in shared memory, as tensor cores before Hopper's and of 12.0 need."""
    if shared_bytes >= HOPPER_BYTES:
        return num_stages
    return min(num_stages, 1 + shared_bytes // stage_bytes)
