"""Paged attention of generation windows, from the fused projection on: norm and rotate the queries and keys of each
request's last W tokens, put their keys and values into the pool, and attend to all that the request has there.

Lengths and block tables are read on the device, so a captured launch can be replayed with others. A launch depends
on shapes only: requests are cut into a number of splits chosen from the batch, the heads, the device and the width
of the block table, and each split takes an equal share of what the request's length turns out to be.

`window_attention` runs Triton kernels where there are any and their plain-torch twin elsewhere. It does not know
requests, layers or plans: one layer of the pool, one launch.
"""

import math
from dataclasses import dataclass

import torch

from tllm_spec.kernels.early_launch import early_launch
from tllm_spec.kernels.rotary_write import HeadWeights, Rotary, plain_rotary_write
from tllm_spec.kernels.triton_support import has_kernels

# Of four warps, which are enough to keep the memory busy; more of them only begin and end more often.
PROGRAMS_PER_MULTIPROCESSOR = 3
# Of two warps: on an H200 so many run at once.
SMALL_PROGRAMS_PER_MULTIPROCESSOR = 4
# A split has more keys than this, in whole blocks: with fewer its fixed costs (its query rows, its partial result)
# outweigh reading them.
MIN_KEYS_PER_SPLIT, MIN_KEYS_PER_BLOCK = 64, 64
# Where a program for each tile is more than half of what fills the device, only what is very long is split.
MIN_KEYS_PER_LONG_SPLIT, MAX_LONG_SPLITS = 2048, 4
MAX_SPLITS = 64
# 32 query rows for each of 8 programs of 128 multiprocessors.
MAX_PARTIAL_ROWS = 1 << 15
MAX_TILE_ROWS = 64
MAX_TILE_KEYS = 128
# The keys, and as many values, that are on their way while a program computes on those before.
TILE_BYTES = 16384
# Of a thread, where a program has 128 threads and three share 65,536.
MAX_REGISTERS = 168


@dataclass(frozen=True)
class WindowPlaces:
    """Where B windows of W tokens stand in the pool; all on the device."""

    block_tables: torch.Tensor
    """`[B, P]` int32."""
    kv_lens: torch.Tensor
    """`[B]` int32, at least 1; tokens in the cache, the W of the window included."""
    kv_slots: torch.Tensor
    """`[B * W]` int64: page * page_size + offset of each token of the windows, as the block table has it."""
    num_padding: torch.Tensor | None = None
    """`[B]` int64: of each window so many rows, its first, are nobody's. Their keys are not seen, but what the pool has
    at their positions is; kv_slots sends them where nobody looks, if they are written at all."""


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

    def splits(self, num_tiles: int, num_rows: int, max_len: int) -> "Splits":
        """Of a launch that would have `num_tiles` programs and `num_rows` output rows were nothing split."""
        wanted, min_keys = self.num_programs // num_tiles, MIN_KEYS_PER_SPLIT
        are_rare = wanted <= 1
        if are_rare:
            wanted, min_keys = MAX_LONG_SPLITS, MIN_KEYS_PER_LONG_SPLIT
        most = -(-max_len // (min_keys + MIN_KEYS_PER_BLOCK))
        number = min(wanted, self.outputs.shape[0] // num_rows, most, MAX_SPLITS)
        return Splits(max(1, number), min_keys, are_rare, self._are_small(num_tiles))

    def _are_small(self, num_programs: int) -> bool:
        """Whether so many programs, in as many turns as they need, leave fewer places empty with two warps each than
        with four."""
        small = self.num_programs * SMALL_PROGRAMS_PER_MULTIPROCESSOR // PROGRAMS_PER_MULTIPROCESSOR
        return -(-num_programs // small) * small <= -(-num_programs // self.num_programs) * self.num_programs


@dataclass(frozen=True)
class Splits:
    """min_keys: a split has more. are_rare: most requests are not split. small_programs: of two warps, not four."""

    number: int
    min_keys: int
    are_rare: bool
    small_programs: bool


def window_attention(
    qkv: torch.Tensor,
    turns: torch.Tensor,
    layer: torch.Tensor,
    places: WindowPlaces,
    scale: float,
    workspace: WindowWorkspace,
    norm: HeadWeights | None = None,
) -> torch.Tensor:
    """Query w of request b stands at position kv_lens[b] - W + w and sees the keys up to there.

    Keys beyond a request's length and beyond its block table are never read. A query before position 0, which only
    a row of graph padding can have, sees nothing and gives zeros (if what its page holds is finite).

    Args:
        qkv: `[B, W, Hq + 2 * Hkv, D]`, contiguous, D even, as projected; may be overwritten.
        turns: `[B * W, 2, 1, D]`, contiguous: the rotary table's rows of the tokens (`Rotary.gathered`).
        layer: `[2, pages, page_size, Hkv, D]`, contiguous, of qkv's dtype, page_size a power of two; keys at 0, values
            at 1.
        places: of the windows.
        scale: of the scores before the softmax.
        workspace: for partial results; overwritten.
        norm: of each head of q and k, before the rotation; None: none.

    Returns:
        `[B, W, Hq * D]`.
    """
    if not has_kernels(qkv.device):
        rotary = Rotary(turns, torch.arange(len(turns), device=turns.device))
        plain_rotary_write(qkv.flatten(0, 1), rotary, places.kv_slots, layer, norm)
        q = qkv[:, :, : qkv.shape[2] - 2 * layer.shape[3]]
        return plain_window_attention(q, layer, places.block_tables, places.kv_lens, scale)
    assert qkv.is_contiguous() and layer.is_contiguous() and qkv.dtype == layer.dtype
    assert turns.is_contiguous() and places.kv_slots.is_contiguous()
    assert places.block_tables.stride(1) == 1 and places.kv_lens.stride(0) == 1
    return _launch_attention(qkv, turns, layer, places, scale, workspace, norm)


def _launch_attention(
    qkv: torch.Tensor,
    turns: torch.Tensor,
    layer: torch.Tensor,
    places: WindowPlaces,
    scale: float,
    workspace: WindowWorkspace,
    norm: HeadWeights | None,
) -> torch.Tensor:
    from tllm_spec.kernels.window_attention_triton import attention_kernel, reduction_kernel

    (batch, window, all_heads, head_dim), (page_size, kv_heads) = qkv.shape, layer.shape[2:4]
    heads, max_len = all_heads - 2 * kv_heads, places.block_tables.shape[1] * page_size
    group, block_d = heads // kv_heads, _power_of_two(head_dim)
    block_m = min(MAX_TILE_ROWS, max(16, _power_of_two(window * group)))
    num_tiles = kv_heads * -(-window * group // block_m)
    splits = workspace.splits(batch * num_tiles, batch * window * heads, max_len)
    block_n = max(16, min(MAX_TILE_KEYS, TILE_BYTES // (block_d * layer.element_size())))
    output = qkv.new_empty(batch, window, heads * head_dim)
    sizes = {"WINDOW": window, "HEAD_DIM": head_dim, "BLOCK_N": block_n, "BLOCK_D": block_d}
    sizes |= early_launch(qkv.device)
    weights, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    tables = (places.block_tables, places.block_tables.stride(0), places.kv_lens, max_len)
    partials = (workspace.outputs, workspace.log_sums)
    attention_kernel[(num_tiles, batch, splits.number)](
        *(qkv, turns, weights, eps, layer, layer.stride(0), places.kv_slots, *tables),
        *(scale * math.log2(math.e), output, *partials, splits.number, splits.min_keys, places.num_padding),
        **sizes,
        PADDED=places.num_padding is not None,
        HAS_NORM=norm is not None,
        SPLITS=splits.number > 1,
        GROUP=group,
        KV_HEADS=kv_heads,
        PAGE_SIZE=page_size,
        BLOCK_M=block_m,
        BLOCK_W=max(16, _power_of_two(window)),
        WIDEN=qkv.device.type == "cpu",  # Triton's interpreter multiplies the bits of bfloat16 numbers
        **_warps(splits, block_m, block_d),
        num_stages=3,
    )
    if splits.number > 1:
        rows = 8 if splits.are_rare and heads % 8 == 0 else 1
        reduction_kernel[(batch * window * heads // rows,)](
            *(*partials, places.kv_lens, output, max_len, splits.number, splits.min_keys, places.num_padding),
            **sizes,
            PADDED=places.num_padding is not None,
            HEADS=heads,
            ROWS=rows,
            BLOCK_S=_power_of_two(splits.number),
            num_warps=4,
        )
    return output


def _warps(splits: Splits, block_m: int, block_d: int) -> dict[str, int]:
    """Measured on an H200 for 16 rows and heads of 128 in bfloat16: a program of four warps, three of which have room
    for their registers, ends earlier than one of two; four of these read as fast together."""
    if block_m > 16 or block_d > 128:
        return {"num_warps": 8 if block_m * block_d > 8192 else 4}
    return {"num_warps": 2} if splits.small_programs else {"num_warps": 4, "maxnreg": MAX_REGISTERS}


def plain_window_attention(
    q: torch.Tensor, layer: torch.Tensor, block_tables: torch.Tensor, kv_lens: torch.Tensor, scale: float
) -> torch.Tensor:
    """The attention of `window_attention`'s twin, in float32 from end to end: q `[B, W, Hq, D]` and the pool as they
    are when the window's keys and values are in it."""
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


def _power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
