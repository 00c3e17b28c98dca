"""Paged attention of generation windows: the last W tokens of each request attend to all that it has in the pool.

Lengths and block tables are read on the device, so a captured launch can be replayed with others. A launch depends
on shapes only: requests are cut into a number of splits chosen from the batch, the heads, the device and the width
of the block table, and each split takes an equal share of what the request's length turns out to be.

`window_attention` runs the Triton kernels where there are any and their plain-torch twin elsewhere. It does not know
requests, layers or plans: one layer of the pool, one launch.
"""

import functools
import importlib.util
import math
import os
from dataclasses import dataclass

import torch

from tllm_spec.kernels.early_launch import early_launch

# More than a multiprocessor holds at once (3 to 5 of an 8B Llama's), so that requests of different lengths even out.
PROGRAMS_PER_MULTIPROCESSOR = 8
# Below this a split's fixed costs (its query rows, its partial result) outweigh reading its keys.
MIN_KEYS_PER_SPLIT = 128
MAX_SPLITS = 64
# 32 query rows for each of the 8 programs of 128 multiprocessors.
MAX_PARTIAL_ROWS = 1 << 15
MAX_TILE_ROWS = 64
MAX_TILE_KEYS = 128
# The keys, and as many values, that are on their way while a program computes on those before.
TILE_BYTES = 16384


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton is there for the device: CUDA, or its interpreter on the CPU (TRITON_INTERPRET=1)."""
    runs = device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")
    return runs and importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class WindowWorkspace:
    """Where splits leave their partial results. One serves all launches of one stream, of any shape; its addresses
    are part of every captured graph, so it lives as long as they do."""

    outputs: torch.Tensor
    """[R, D] float32: row ((b * W + w) * Hq + head) * num_splits + split."""
    log_sums: torch.Tensor
    """[R] float32: log2 of the summed weights of those rows."""
    num_programs: int
    """How many programs a launch should have to fill the device."""

    @classmethod
    def allocate(cls, head_dim: int, device: torch.device) -> "WindowWorkspace":
        num_multiprocessors = 1
        if device.type == "cuda":
            num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        outputs = torch.empty(MAX_PARTIAL_ROWS, head_dim, dtype=torch.float32, device=device)
        return cls(
            outputs, outputs.new_empty(MAX_PARTIAL_ROWS), num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
        )

    def num_splits(self, num_tiles: int, num_rows: int, max_len: int) -> int:
        """Splits of a launch with `num_tiles` programs and `num_rows` output rows were nothing split."""
        wanted = min(self.num_programs // num_tiles, self.outputs.shape[0] // num_rows)
        return max(1, min(wanted, -(-max_len // MIN_KEYS_PER_SPLIT), MAX_SPLITS))


def window_attention(
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    workspace: WindowWorkspace,
) -> torch.Tensor:
    """Query w of request b stands at position kv_lens[b] - W + w and sees the keys up to there.

    Keys beyond a request's length and beyond its block table are never read. A query before position 0, which only
    a row of graph padding can have, sees nothing and gives zeros (if what its page holds is finite).

    Args:
        q: `[B, W, Hq, D]`, any strides but the last.
        layer: `[2, pages, page_size, Hkv, D]`, contiguous, page_size a power of two; keys at 0, values at 1.
        block_tables: `[B, P]` int32, on the device.
        kv_lens: `[B]` int32, at least 1, on the device; tokens in the cache, the W queries included.
        scale: of the scores before the softmax.
        workspace: for partial results; overwritten.

    Returns:
        `[B, W, Hq * D]`.
    """
    if not has_kernels(q.device):
        return plain_window_attention(q, layer, block_tables, kv_lens, scale)
    assert q.stride(3) == 1 and layer.is_contiguous()
    assert block_tables.stride(1) == 1 and kv_lens.stride(0) == 1
    return _launch_attention(q, layer, block_tables, kv_lens, scale, workspace)


def _launch_attention(
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    workspace: WindowWorkspace,
) -> torch.Tensor:
    from tllm_spec.kernels.window_attention_triton import attention_kernel, reduction_kernel

    (batch, window, heads, head_dim), (page_size, kv_heads) = q.shape, layer.shape[2:4]
    group, max_len, block_d = heads // kv_heads, block_tables.shape[1] * page_size, _power_of_two(head_dim)
    block_m = min(MAX_TILE_ROWS, max(16, _power_of_two(window * group)))
    block_n = max(16, min(MAX_TILE_KEYS, TILE_BYTES // (block_d * layer.element_size())))
    num_tiles = kv_heads * -(-window * group // block_m)
    num_splits = workspace.num_splits(batch * num_tiles, batch * window * heads, max_len)
    output = q.new_empty(batch, window, heads * head_dim)
    sizes = {"HEAD_DIM": head_dim, "BLOCK_N": block_n, "BLOCK_D": block_d} | early_launch(q.device)
    attention_kernel[(num_tiles, num_splits, batch)](
        q,
        layer,
        block_tables,
        kv_lens,
        output if num_splits == 1 else workspace.outputs,
        workspace.log_sums,
        scale * math.log2(math.e),
        *q.stride()[:3],
        layer.stride(0),
        block_tables.stride(0),
        max_len,
        num_splits,
        **sizes,
        SPLITS=num_splits > 1,
        WINDOW=window,
        GROUP=group,
        KV_HEADS=kv_heads,
        PAGE_SIZE=page_size,
        BLOCK_M=block_m,
        WIDEN=q.device.type == "cpu",  # Triton's interpreter multiplies the bits of bfloat16 numbers
        num_warps=8 if block_m * block_d > 8192 else 4,
        num_stages=3,
    )
    if num_splits > 1:
        reduction_kernel[(batch * window * heads,)](
            workspace.outputs,
            workspace.log_sums,
            kv_lens,
            output,
            max_len,
            num_splits,
            **sizes,
            ROWS=window * heads,
            BLOCK_S=_power_of_two(num_splits),
            num_warps=4,
        )
    return output


def plain_window_attention(
    q: torch.Tensor, layer: torch.Tensor, block_tables: torch.Tensor, kv_lens: torch.Tensor, scale: float
) -> torch.Tensor:
    """The twin of `window_attention`, in float32 from end to end."""
    batch, window, heads, head_dim = q.shape
    page_size, kv_heads = layer.shape[2:4]
    keys = torch.arange(block_tables.shape[1] * page_size, device=q.device)
    slots = block_tables[:, keys // page_size] * page_size + keys % page_size  # [B, L]
    absent = keys >= kv_lens[:, None]
    cached = layer.view(2, -1, kv_heads, head_dim)[:, slots].float()
    cached = cached.masked_fill(absent[:, :, None, None], 0).permute(0, 1, 3, 2, 4)  # [2, B, Hkv, L, D]
    positions = kv_lens[:, None] + torch.arange(-window, 0, device=q.device)
    hidden = (keys > positions[:, :, None]) | absent[:, None]
    hidden = hidden.repeat_interleave(heads // kv_heads, dim=1)[:, None]  # [B, 1, W * G, L]
    queries = q.float().view(batch, window, kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3)
    scores = (queries @ cached[0].mT * scale).masked_fill(hidden, -torch.inf)
    weights = scores.softmax(dim=-1).masked_fill(hidden, 0)  # a row without keys has NaN here, and gets zeros
    mixed = (weights @ cached[1]).view(batch, kv_heads, window, -1, head_dim).transpose(1, 2)
    return mixed.reshape(batch, window, heads * head_dim).to(q.dtype)


def plain_write_kv(kv: torch.Tensor, kv_slots: torch.Tensor, layer: torch.Tensor) -> None:
    """Put the rows of kv `[T, 2, Hkv, D]` into slots `[T]` of `layer` `[2, pages, page_size, Hkv, D]`; the kernel that
    does so is `rotary_write`, which rotates the keys first."""
    layer.view(2, -1, *layer.shape[3:]).index_copy_(1, kv_slots, kv.transpose(0, 1))


def _power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
