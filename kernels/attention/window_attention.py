"""Paged attention of generation windows: norm and rotate the queries and keys of each request's
last tokens, up to W, write their keys and values into the KV pool, and attend to the request's
whole context.

Lengths and block tables are read on the device, so a captured launch can be replayed with other
ones. The launch depends on shapes only: the number of splits of the keys follows from the batch,
the heads, the device and the width of the block table. Each split takes an equal share of the
request's actual length.

`window_attention` runs a CUDA kernel for the shapes that it supports (window_attention_cuda.py), a
Triton kernel for others, for rows that see a part of the keys and without cuda-python, and the
plain-torch reference without Triton."""

import math
from dataclasses import dataclass

import torch

from tllm_spec.kernels.attention.kv_codes import CODES, UNSCALED, KVScales
from tllm_spec.kernels.attention.rotary_write import HeadWeights, Rotary, rotary_write
from tllm_spec.kernels.attention.visible_keys import KeySpans, TreeMask, hidden_keys
from tllm_spec.kernels.attention.window_attention_cuda import (
    BLOCK_KEYS,
    Layout,
    Operands,
    WindowSizes,
    launch,
    layout_of,
    serves,
)
from tllm_spec.kernels.attention.window_splits import (
    MAX_LONG_SPLITS,
    MAX_NARROW_D,
    MAX_TILE_ROWS,
    Splits,
    WindowWorkspace,
    is_wide,
    power_of_two,
    stages_next_to,
    tile_keys,
    warps_of,
)
from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.launch import programmatic_launch
from tllm_spec.kernels.slots.round_rows import RoundRows


@dataclass(frozen=True)
class WindowTables:
    """Positions of B windows in the KV pool, T rows in all; all tensors on the device."""

    rows: RoundRows
    """The windows' rows. Those of windows with padding are a rectangle."""
    block_tables: torch.Tensor
    """`[B, P]` int32."""
    kv_lens: torch.Tensor
    """`[B]` int32, at least 1: tokens in the cache, including those of the window."""
    kv_slots: torch.Tensor
    """`[T]` int64: page * page_size + offset of each token of the windows, as in the block
    table."""
    num_padding: torch.Tensor | None = None
    """`[B]` int64: number of padding rows at the start of each window. Their keys are masked; the
    keys that the pool has at their positions are attended to. Their kv_slots point to the dummy
    page."""
    tree: TreeMask | None = None
    """Which keys the rows see, if the windows are rows of trees; then there is no padding. None:
    the windows are chains."""
    spans: KeySpans | None = None
    """The keys that each row sees; `tree` has been cut by them already. None: rows see all keys
    before their own."""


@dataclass(frozen=True)
class WindowCall:
    """The arguments of `window_attention`."""

    qkv: torch.Tensor
    """`[T, Hq + 2 * Hkv, D]`, contiguous, D even, as projected; may be overwritten. Or `[T, Hq,
    D]`: the pool has the windows' keys and values already."""
    cos_sin: torch.Tensor
    """`[T, 2, 1, D]`, contiguous: rows of the rotary table (`Rotary.cos_sin`)."""
    layer: torch.Tensor
    """`[2, pages, page_size, Hkv, D]`, contiguous, of qkv's dtype or CODES, page_size a power of
    two; keys at 0, values at 1."""
    tables: WindowTables
    scale: float
    """Factor of the scores before the softmax."""
    workspace: WindowWorkspace
    """For partial results; overwritten."""
    norm: HeadWeights | None = None
    """RMSNorm of each head of q and k before the rotation, or of v, too."""
    scales: KVScales = UNSCALED
    """The scales of codes."""
    sinks: torch.Tensor | None = None
    """`[Hq]` float32, contiguous: one more score of each head, which has no value; None: no
    sinks."""
    writes: bool = True
    """Whether qkv has keys and values."""

    @property
    def device(self) -> torch.device:
        return self.qkv.device

    @property
    def tree(self) -> tuple[torch.Tensor | None, int]:
        """Bits and offset of the tree."""
        tree = self.tables.tree
        return (None, 0) if tree is None else (tree.bits, tree.offset)

    @property
    def spans(self) -> tuple[torch.Tensor | None, int]:
        """Positions of the rows and the code of their span, or 0."""
        spans = self.tables.spans
        return (None, 0) if spans is None else (spans.positions, spans.span.code)

    @property
    def weights(self) -> tuple[torch.Tensor | None, float]:
        """Weights and eps of the norm."""
        return (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)

    @property
    def norms_values(self) -> bool:
        return self.norm is not None and self.norm.norms_values

    def windows(self) -> WindowSizes:
        (_, all_heads, head_dim), (page_size, kv_heads) = self.qkv.shape, self.layer.shape[2:4]
        rows, max_len = self.tables.rows, self.tables.block_tables.shape[1] * page_size
        group = all_heads // kv_heads - (2 if self.writes else 0)
        sizes = group, kv_heads, head_dim, max_len
        return WindowSizes(rows.num_requests, rows.window, *sizes, self.layer.dtype == CODES)

    def output(self, windows: WindowSizes) -> torch.Tensor:
        heads = windows.kv_heads * windows.group
        return self.qkv.new_empty(len(self.qkv), heads * windows.head_dim)


@with_kernel("attention.window_attention.launch_window_attention")
def window_attention(call: WindowCall) -> torch.Tensor:
    """The queries of request b are its last tokens, up to token kv_lens[b] - 1. Each attends to the
    keys up to its own, or to those that `tables.tree` names, with `tables.spans` to those of its
    span only.

    Lengths, tables, and the keys and values of earlier tokens must have been written before the
    projection that made qkv began (programmatic_launch.py). Keys beyond a request's length or its
    block table are never read. A query before position 0, which only a row of graph padding can
    have, attends to nothing and gives zeros (if its page holds finite values).

    Returns `[T, Hq * D]`."""
    qkv, layer, tables = call.qkv, call.layer, call.tables
    rotary = Rotary(call.cos_sin, torch.arange(len(call.cos_sin), device=call.device))
    pages = layer if call.writes else None
    rotary_write.reference(qkv, rotary, tables.kv_slots, pages, call.norm, call.scales)
    q = qkv[:, : qkv.shape[1] - 2 * layer.shape[3]] if call.writes else qkv
    lengths, masks = (tables.block_tables, tables.kv_lens), (tables.tree, tables.spans)
    options = call.scales, call.sinks
    return plain_window_attention(q, layer, tables.rows, *lengths, call.scale, *masks, *options)


def launch_window_attention(call: WindowCall) -> torch.Tensor:
    """The kernels of `window_attention`."""
    qkv, cos_sin, layer, tables = call.qkv, call.cos_sin, call.layer, call.tables
    norm, sinks, workspace = call.norm, call.sinks, call.workspace
    assert qkv.is_contiguous() and layer.is_contiguous() and layer.dtype in (qkv.dtype, CODES)
    assert cos_sin.is_contiguous() and tables.kv_slots.is_contiguous()
    assert tables.block_tables.stride(1) == 1 and tables.kv_lens.stride(0) == 1
    assert tables.block_tables.dtype == tables.kv_lens.dtype == torch.int32
    assert tables.kv_slots.dtype == torch.int64
    assert tables.num_padding is None or tables.num_padding.dtype == torch.int64
    assert tables.num_padding is None or tables.tree is None
    offsets = tables.rows.offsets
    assert offsets is None or tables.num_padding is None
    assert tables.tree is None or tables.tree.rows.offsets is offsets
    assert offsets is None or (offsets.dtype == torch.int32 and offsets.is_contiguous())
    assert norm is None or norm.weight.is_contiguous()
    assert tables.spans is None or tables.spans.positions.is_contiguous()
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    windows, layout = call.windows(), None
    is_plain = call.writes and tables.spans is None and not call.norms_values
    if is_plain and serves(qkv, cos_sin, call.weights[0], layer):
        layout = layout_of(windows, workspace.num_processors, len(workspace.outputs))
    return _launch_triton(call, windows) if layout is None else _launch_cuda(call, windows, layout)


def _launch_cuda(call: WindowCall, windows: WindowSizes, layout: Layout) -> torch.Tensor:
    (weights, eps), (tree_bits, offset) = call.weights, call.tree
    tables, workspace, output = call.tables, call.workspace, call.output(windows)
    operands = Operands(
        *(call.qkv, call.cos_sin, weights, call.layer, output),
        *(tables.block_tables, tables.kv_lens, tables.rows.offsets),
        tables.kv_slots,
        *(tables.num_padding, tree_bits, call.sinks),
        *((None, None) if layout.in_clusters else (workspace.outputs, workspace.log_sums)),
    )
    launch(operands, windows, layout, call.scale, eps, offset, call.scales)
    if not layout.in_clusters:
        splits = Splits(layout.splits, layout.min_keys, True, False)
        # The splits share all keys that were in the pool before, those of a tree's region too.
        _reduce(call, windows, splits, BLOCK_KEYS, output, offset=0)
    return output


def _launch_triton(call: WindowCall, windows: WindowSizes) -> torch.Tensor:
    from tllm_spec.kernels.attention.window_attention_triton import attention_kernel

    qkv, layer, tables, workspace = call.qkv, call.layer, call.tables, call.workspace
    (tree_bits, offset), (positions, span) = call.tree, call.spans
    output, log2_scale = call.output(windows), call.scale * call.scales.key * math.log2(math.e)
    rows, block_d = windows.window * windows.group, power_of_two(windows.head_dim)
    block_m = min(MAX_TILE_ROWS, max(16, power_of_two(rows)))
    num_tiles = windows.kv_heads * -(-rows // block_m)
    splits = workspace.splits(
        *(windows.batch * num_tiles, windows.tiles * rows),
        min(windows.max_len, abs(span) or windows.max_len),
        is_wide=is_wide(windows.window, block_m),
    )
    block_n = tile_keys(qkv, layer, block_d)
    lengths = (tables.block_tables, tables.block_tables.stride(0), tables.kv_lens, windows.max_len)
    partials = (workspace.outputs, workspace.log_sums)
    attention_kernel[(num_tiles, windows.batch, splits.number)](
        *(qkv, call.cos_sin, *call.weights, call.sinks),
        *(layer, layer.stride(0), tables.kv_slots, *lengths),
        *(log2_scale, output, *partials, splits.number, splits.min_keys, tables.num_padding),
        *(tree_bits, offset, positions, tables.rows.offsets),
        *(1 / call.scales.key, 1 / call.scales.value, call.scales.value),
        **programmatic_launch(qkv.device),
        SPAN=span,
        TREE=tree_bits is not None,
        HAS_OFFSET=offset > 0,
        PADDED=tables.num_padding is not None,
        RAGGED=tables.rows.offsets is not None,
        NORMS=0 if call.norm is None else 1 + call.norms_values,
        WRITES=call.writes,
        # Kernels of wide heads take long to compile: one serves both.
        SPLITS=splits.number > 1 or block_d > MAX_NARROW_D,
        WINDOW=windows.window,
        GROUP=windows.group,
        KV_HEADS=windows.kv_heads,
        HEAD_DIM=windows.head_dim,
        PAGE_SIZE=layer.shape[2],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_W=max(16, power_of_two(windows.window)),
        BLOCK_D=block_d,
        WIDEN=qkv.device.type == "cpu",  # the interpreter cannot multiply bfloat16
        **warps_of(splits, block_m, block_d),
        num_stages=stages_next_to(qkv, block_m, block_d),
    )
    if splits.number > 1:
        _reduce(call, windows, splits, block_n, output, offset)
    return output


def _reduce(
    call: WindowCall,
    windows: WindowSizes,
    splits: Splits,
    block_n: int,
    output: torch.Tensor,
    offset: int,
) -> None:
    """Joins the partial results of the splits. Their shares are whole blocks of `block_n` keys
    without the window and the `offset` keys before it."""
    from tllm_spec.kernels.attention.window_splits import reduction_kernel

    heads, workspace, tables = windows.kv_heads * windows.group, call.workspace, call.tables
    rows = 8 if splits.are_rare and heads % 8 == 0 else 1
    reduction_kernel[(windows.batch * windows.window * heads // rows,)](
        *(workspace.outputs, workspace.log_sums, tables.kv_lens, output, windows.max_len),
        *(splits.number, splits.min_keys, tables.num_padding, offset, tables.rows.offsets),
        **programmatic_launch(output.device),
        SPAN=call.spans[1],
        HAS_OFFSET=offset > 0,
        PADDED=tables.num_padding is not None,
        RAGGED=tables.rows.offsets is not None,
        HEADS=heads,
        ROWS=rows,
        WINDOW=windows.window,
        HEAD_DIM=windows.head_dim,
        BLOCK_N=block_n,
        # The same compiled kernel for all widths of the block table.
        BLOCK_S=power_of_two(MAX_LONG_SPLITS if splits.are_rare else splits.number),
        BLOCK_D=power_of_two(windows.head_dim),
        num_warps=4,
    )


def plain_window_attention(
    q: torch.Tensor,
    layer: torch.Tensor,
    rows: RoundRows,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    tree: TreeMask | None = None,
    spans: KeySpans | None = None,
    scales: KVScales = UNSCALED,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of the attention in `window_attention`, in float32. q: `[T, Hq, D]`, after norm and
    rotation; the pool holds the windows' keys and values already. The others are as in
    `WindowTables`."""
    (heads, head_dim), (page_size, kv_heads) = q.shape[1:], layer.shape[2:4]
    keys = torch.arange(block_tables.shape[1] * page_size, device=q.device)
    slots = block_tables[:, keys // page_size] * page_size + keys % page_size  # [B, L]
    absent = keys >= kv_lens[:, None]
    if spans is not None:
        first_keys = rows.padded(spans.first_keys())
        absent |= keys < first_keys.amin(1, keepdim=True)
    cached = layer.view(2, -1, kv_heads, head_dim)[:, slots].float()
    cached = cached.masked_fill(absent[:, :, None, None], 0)
    cached = cached.permute(0, 1, 3, 2, 4)  # [2, B, Hkv, L, D]
    hidden = hidden_keys(rows, kv_lens, keys, tree)
    if tree is None:
        hidden |= absent[:, None]
    if spans is not None:
        hidden |= keys < first_keys[:, :, None]
    hidden = hidden.repeat_interleave(heads // kv_heads, dim=1)[:, None]  # [B, 1, W * G, L]
    shape = rows.num_requests, rows.window, kv_heads, -1, head_dim
    queries = rows.padded(q.float()).view(shape).transpose(1, 2).flatten(2, 3)
    scores = (queries @ cached[0].mT * (scale * scales.key)).masked_fill(hidden, -torch.inf)
    if sinks is not None:
        by_row = sinks.view(kv_heads, 1, -1).expand(-1, rows.window, -1).reshape(kv_heads, -1, 1)
        scores = torch.cat((scores, by_row.expand(len(scores), -1, -1, -1)), -1)
    # The softmax of a row without keys is NaN; it becomes zeros.
    weights = scores.softmax(dim=-1)[..., : len(keys)].masked_fill(hidden, 0)
    mixed = (weights @ cached[1] * scales.value).view(
        -1, kv_heads, rows.window, heads // kv_heads, head_dim
    )
    return rows.flat(mixed.transpose(1, 2)).reshape(len(q), heads * head_dim).to(q.dtype)
