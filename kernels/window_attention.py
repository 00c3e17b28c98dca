"""Paged attention of generation windows, from the fused projection on: norm and rotate the queries
and keys of each request's last W tokens, put their keys and values into the pool, and attend to all
that the request has there.

Lengths and block tables are read on the device, so a captured launch can be replayed with others. A
launch depends
on shapes only: requests are cut into a number of splits chosen from the batch, the heads, the
device and the width of the block table, and each split takes an equal share of what the request's
length turns out to be.

`window_attention` runs a CUDA kernel for the shapes that it serves (window_attention_cuda.py),
Triton kernels for others and where there is no cuda-python, and the plain-torch reference where
there is no Triton. It does not know requests,
layers or plans: one layer of the pool.
"""

import math
from dataclasses import dataclass

import torch

from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.rotary_write import HeadWeights, Rotary, plain_rotary_write
from tllm_spec.kernels.triton_support import has_kernels
from tllm_spec.kernels.window_attention_cuda import (
    BLOCK_KEYS,
    Layout,
    Operands,
    Windows,
    launch,
    layout_of,
    serves,
)
from tllm_spec.kernels.window_splits import (
    MAX_LONG_SPLITS,
    MAX_TILE_KEYS,
    MAX_TILE_ROWS,
    TILE_BYTES,
    Splits,
    WindowWorkspace,
    power_of_two,
    warps_of,
)


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

    Lengths, tables, and what the pool has of earlier tokens must have been written before the
    projection that made qkv began to work (programmatic_launch.py). Keys beyond a request's length
    and beyond its block table are never read. A query before position 0, which only a row of graph
    padding can have, sees nothing and gives zeros (if what its page holds is finite).

    Args:
        qkv: `[B, W, Hq + 2 * Hkv, D]`, contiguous, D even, as projected; may be overwritten.
        turns: `[B * W, 2, 1, D]`, contiguous: the rotary table's rows of the tokens
        (`Rotary.gathered`).
        layer: `[2, pages, page_size, Hkv, D]`, contiguous, of qkv's dtype, page_size a power of
        two; keys at 0, values
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
    assert places.block_tables.dtype == places.kv_lens.dtype == torch.int32
    assert places.kv_slots.dtype == torch.int64
    assert places.num_padding is None or places.num_padding.dtype == torch.int64
    assert norm is None or norm.weight.is_contiguous()
    call = _Call(qkv, turns, layer, places, scale, workspace, norm)
    windows, layout = call.windows(), None
    if serves(qkv, turns, call.weights[0], layer):
        layout = layout_of(windows, workspace.num_processors, len(workspace.outputs))
    return _launch_triton(call, windows) if layout is None else _launch_cuda(call, windows, layout)


@dataclass(frozen=True)
class _Call:
    """The arguments of `window_attention`."""

    qkv: torch.Tensor
    turns: torch.Tensor
    layer: torch.Tensor
    places: WindowPlaces
    scale: float
    workspace: WindowWorkspace
    norm: HeadWeights | None

    @property
    def weights(self) -> tuple[torch.Tensor | None, float]:
        """The norm's."""
        return (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)

    def windows(self) -> Windows:
        (batch, window, all_heads, head_dim), (page_size, kv_heads) = (
            self.qkv.shape,
            self.layer.shape[2:4],
        )
        max_len = self.places.block_tables.shape[1] * page_size
        return Windows(batch, window, all_heads // kv_heads - 2, kv_heads, head_dim, max_len)

    def output(self, windows: Windows) -> torch.Tensor:
        heads = windows.kv_heads * windows.group
        return self.qkv.new_empty(windows.batch, windows.window, heads * windows.head_dim)


def _launch_cuda(call: _Call, windows: Windows, layout: Layout) -> torch.Tensor:
    (weights, eps), output = call.weights, call.output(windows)
    places, workspace = call.places, call.workspace
    operands = Operands(
        *(call.qkv, call.turns, weights, call.layer, output),
        *(places.block_tables, places.kv_lens, places.kv_slots, places.num_padding),
        *((None, None) if layout.in_clusters else (workspace.outputs, workspace.log_sums)),
    )
    launch(operands, windows, layout, call.scale, eps)
    if not layout.in_clusters:
        _reduce(
            call, windows, Splits(layout.splits, layout.min_keys, True, False), BLOCK_KEYS, output
        )
    return output


def _launch_triton(call: _Call, windows: Windows) -> torch.Tensor:
    from tllm_spec.kernels.window_attention_triton import attention_kernel

    qkv, layer, places, workspace = call.qkv, call.layer, call.places, call.workspace
    output, log2_scale = call.output(windows), call.scale * math.log2(math.e)
    rows, block_d = windows.window * windows.group, power_of_two(windows.head_dim)
    block_m = min(MAX_TILE_ROWS, max(16, power_of_two(rows)))
    num_tiles = windows.kv_heads * -(-rows // block_m)
    splits = workspace.splits(windows.batch * num_tiles, windows.tiles * rows, windows.max_len)
    block_n = max(16, min(MAX_TILE_KEYS, TILE_BYTES // (block_d * layer.element_size())))
    tables = (places.block_tables, places.block_tables.stride(0), places.kv_lens, windows.max_len)
    partials = (workspace.outputs, workspace.log_sums)
    attention_kernel[(num_tiles, windows.batch, splits.number)](
        *(qkv, call.turns, *call.weights, layer, layer.stride(0), places.kv_slots, *tables),
        *(log2_scale, output, *partials, splits.number, splits.min_keys, places.num_padding),
        **programmatic_launch(qkv.device),
        PADDED=places.num_padding is not None,
        HAS_NORM=call.norm is not None,
        SPLITS=splits.number > 1,
        WINDOW=windows.window,
        GROUP=windows.group,
        KV_HEADS=windows.kv_heads,
        HEAD_DIM=windows.head_dim,
        PAGE_SIZE=layer.shape[2],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_W=max(16, power_of_two(windows.window)),
        BLOCK_D=block_d,
        WIDEN=qkv.device.type
        == "cpu",  # Triton's interpreter multiplies the bits of bfloat16 numbers
        **warps_of(splits, block_m, block_d),
        num_stages=3,
    )
    if splits.number > 1:
        _reduce(call, windows, splits, block_n, output)
    return output


def _reduce(
    call: _Call, windows: Windows, splits: Splits, block_n: int, output: torch.Tensor
) -> None:
    """Join partial results; shares of the keys are whole blocks of `block_n`."""
    from tllm_spec.kernels.window_attention_triton import reduction_kernel

    heads, workspace, places = windows.kv_heads * windows.group, call.workspace, call.places
    rows = 8 if splits.are_rare and heads % 8 == 0 else 1
    reduction_kernel[(windows.batch * windows.window * heads // rows,)](
        *(workspace.outputs, workspace.log_sums, places.kv_lens, output, windows.max_len),
        *(splits.number, splits.min_keys, places.num_padding),
        **programmatic_launch(output.device),
        PADDED=places.num_padding is not None,
        HEADS=heads,
        ROWS=rows,
        WINDOW=windows.window,
        HEAD_DIM=windows.head_dim,
        BLOCK_N=block_n,
        # One program for all widths of the block table.
        BLOCK_S=power_of_two(MAX_LONG_SPLITS if splits.are_rare else splits.number),
        BLOCK_D=power_of_two(windows.head_dim),
        num_warps=4,
    )


def plain_window_attention(
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The attention of `window_attention`'s reference, in float32 from end to end: q `[B, W, Hq,
    D]` and the pool as they are when the window's keys and values are in it."""
    batch, window, heads, head_dim = q.shape
    page_size, kv_heads = layer.shape[2:4]
    keys = torch.arange(block_tables.shape[1] * page_size, device=q.device)
    slots = block_tables[:, keys // page_size] * page_size + keys % page_size  # [B, L]
    absent = keys >= kv_lens[:, None]
    cached = layer.view(2, -1, kv_heads, head_dim)[:, slots].float()
    cached = cached.masked_fill(absent[:, :, None, None], 0).permute(
        0, 1, 3, 2, 4
    )  # [2, B, Hkv, L, D]
    positions = kv_lens[:, None] + torch.arange(-window, 0, device=q.device)
    hidden = (keys > positions[:, :, None]) | absent[:, None]
    hidden = hidden.repeat_interleave(heads // kv_heads, dim=1)[:, None]  # [B, 1, W * G, L]
    queries = q.float().view(batch, window, kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3)
    scores = (queries @ cached[0].mT * scale).masked_fill(hidden, -torch.inf)
    weights = scores.softmax(dim=-1).masked_fill(
        hidden, 0
    )  # a row without keys has NaN here, and gets zeros
    mixed = (weights @ cached[1]).view(batch, kv_heads, window, -1, head_dim).transpose(1, 2)
    return mixed.reshape(batch, window, heads * head_dim).to(q.dtype)
