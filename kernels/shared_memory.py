"""How much shared memory a program may have on a device, how many stages of a pipeline fit, and
which devices have tensor memory.

Tilings are chosen by measurement on Hopper, whose programs may have 227 KiB. With less a pipeline
has fewer stages, which changes no order of sums."""

import functools

import torch

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
