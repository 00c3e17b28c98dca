"""Paged attention of generation windows over MLA's latents, in the absorbed form (arXiv 2405.04434,
section 2.1.2): the key projection is multiplied into the queries before, the value projection into
the result after. So all query heads of all tokens of a window attend to one shared vector per key,
which is key and value, and each page is read once for a tile of query rows.

Lengths and block tables are read on the device, and the launch depends on shapes only, so a
captured launch can be replayed with other lengths. Each split of the keys takes an equal share of
the request's actual length.

`latent_attention` is a Triton kernel if Triton is available, otherwise the plain-torch reference,
which is the definition."""

import math
from dataclasses import dataclass, replace

import torch

from tllm_spec.kernels.attention.kv_codes import CODES, UNSCALED, KVScales
from tllm_spec.kernels.attention.visible_keys import TreeMask
from tllm_spec.kernels.attention.window_splits import power_of_two
from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.launch import HOPPER_BYTES, programmatic_launch, shared_memory_bytes
from tllm_spec.kernels.slots.round_rows import RoundRows

# Each split has at least so many keys.
MIN_KEYS_PER_SPLIT = 64
MAX_SPLITS = 64
# Query rows whose partial results fit the workspace; with R = 512 it takes 32 MiB.
MAX_PARTIAL_ROWS = 1 << 14
# Elements that a program of the reduction adds up, over splits and latent.
REDUCED_ELEMENTS = 8192


@dataclass(frozen=True)
class LatentTables:
    """Positions of B windows in the KV pool, T rows in all; all tensors on the device. The latents
    of the windows themselves are in the pool."""

    rows: RoundRows
    """The windows' rows."""
    block_tables: torch.Tensor
    """`[B, P]` int32."""
    kv_lens: torch.Tensor
    """`[B]` int32, at least 1: tokens in the cache, including those of the window."""
    tree: TreeMask | None = None
    """Which keys the rows see, if the windows are rows of trees; None: those up to their own."""


@dataclass(frozen=True)
class LatentWorkspace:
    """Partial results of the splits. One workspace serves all launches of a stream. Captured graphs
    contain its addresses, so it must live as long as they do."""

    outputs: torch.Tensor
    """[rows, R] float32: row ((b * W + w) * H + head) * num_splits + split."""
    log_sums: torch.Tensor
    """[rows] float32: log2 of the summed weights of those rows."""
    num_processors: int

    @classmethod
    def allocate(cls, latent_dim: int, device: torch.device) -> "LatentWorkspace":
        number = 1
        if device.type == "cuda":
            number = torch.cuda.get_device_properties(device).multi_processor_count
        outputs = torch.empty(MAX_PARTIAL_ROWS, latent_dim, dtype=torch.float32, device=device)
        return cls(outputs, outputs.new_empty(MAX_PARTIAL_ROWS), number)

    def num_splits(self, num_tiles: int, num_rows: int, max_len: int) -> int:
        """Splits of a launch that has `num_tiles` programs and `num_rows` output rows without
        splits: as many as fill the device once."""
        wanted = self.num_processors // num_tiles
        fitting = len(self.outputs) // num_rows
        return max(1, min(wanted, fitting, -(-max_len // MIN_KEYS_PER_SPLIT), MAX_SPLITS))


@with_kernel("launch_latent_attention")
def latent_attention(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    layer: torch.Tensor,
    tables: LatentTables,
    scale: float,
    workspace: LatentWorkspace,
    scales: KVScales = UNSCALED,
) -> torch.Tensor:
    """The queries of request b are its last tokens, up to token kv_lens[b] - 1. Each attends to the
    keys up to its own, or to those that `tables.tree` names.

    Keys beyond a request's length or its block table are never read. A query before position 0,
    which only a row of graph padding can have, attends to nothing and gives zeros.

    Args:
        q_latent: `[H, T, R]`, contiguous: the queries times the key projection.
        q: `[T, H, N + P]`, contiguous; of each head the last P elements are read, rotated.
        layer: `[pages, page_size, R + P]`, contiguous, page_size a power of two; of q's dtype or
            CODES.
        tables: of the windows.
        scale: factor of the scores before the softmax.
        workspace: for partial results; overwritten.
        scales: of codes.

    Returns:
        `[H, T, R]`, contiguous: weighted latents.
    """
    return plain_latent_attention(q_latent, q, layer, tables, scale, scales)


def launch_latent_attention(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    layer: torch.Tensor,
    tables: LatentTables,
    scale: float,
    workspace: LatentWorkspace,
    scales: KVScales = UNSCALED,
) -> torch.Tensor:
    """The kernels of `latent_attention`."""
    for tensor in (q_latent, q, layer):
        assert tensor.is_contiguous() and tensor.dtype in (q.dtype, layer.dtype)
    assert q_latent.dtype == q.dtype and layer.dtype in (q.dtype, CODES)
    assert tables.block_tables.stride(1) == 1 and tables.kv_lens.stride(0) == 1
    assert tables.block_tables.dtype == tables.kv_lens.dtype == torch.int32
    assert tables.tree is None or tables.tree.rows.offsets is tables.rows.offsets
    return _launch(q_latent, q, layer, tables, scale, workspace, scales)


@dataclass(frozen=True)
class TileShape:
    """Query rows and keys of a program's step, and its launch. With R + P = 576 queries and keys in
    flight take 164 to 184 KiB of a multiprocessor's shared memory on Hopper."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def _tile_shape(num_rows: int, batch: int, num_processors: int, element_size: int) -> TileShape:
    """Small tiles of a short window while all fit the device at once: they read the same keys at
    the same time, from the L2 cache."""
    if element_size > 2:
        return TileShape(16, 16, 4, 2)
    num_small = -(-num_rows // 16)
    if num_small == 1 or (num_small <= 4 and num_small * batch <= num_processors):
        return TileShape(16, 64, 8, 3)
    return TileShape(64, 64, 8, 2) if num_rows > 32 else TileShape(32, 32, 4, 3)


def _fitting(shape: TileShape, width: int, element_size: int, shared_bytes: int) -> TileShape:
    """The shape, or with less shared memory than Hopper's one that fits: with fewer stages, or a
    smaller one. width: elements of a key, padded."""
    if shared_bytes >= HOPPER_BYTES:
        return shape
    shapes = (shape, replace(shape, num_stages=2), TileShape(32, 32, 4, 2))
    return next(
        (each for each in shapes if _shared_bytes(each, width, element_size) <= shared_bytes),
        TileShape(16, 16, 4, 2),
    )


def _shared_bytes(shape: TileShape, width: int, element_size: int) -> int:
    """Bytes of the queries, of the keys in flight without the block that is in registers, and of a
    block's weights."""
    keys_in_flight = (shape.num_stages - 1) * shape.keys
    elements = (shape.rows + keys_in_flight) * width + shape.rows * shape.keys
    return elements * element_size


def _launch(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    layer: torch.Tensor,
    tables: LatentTables,
    scale: float,
    workspace: LatentWorkspace,
    scales: KVScales = UNSCALED,
) -> torch.Tensor:
    from tllm_spec.kernels.attention.latent_attention_triton import attention_kernel

    (heads, num_tokens, rank), (_, page_size, width) = q_latent.shape, layer.shape
    output = torch.empty_like(q_latent)
    batch, window, tree = tables.rows.num_requests, tables.rows.window, tables.tree
    rows = heads * window
    block_r, block_p = power_of_two(rank), max(16, power_of_two(width - rank))
    shape = _tile_shape(rows, batch, workspace.num_processors, q.element_size())
    shared = shared_memory_bytes(q.device)
    shape = _fitting(shape, block_r + block_p, q.element_size(), shared)
    block_m, block_n = shape.rows, shape.keys
    num_tiles, max_len = -(-rows // block_m), tables.block_tables.shape[1] * page_size
    splits = workspace.num_splits(batch * num_tiles, batch * rows, max_len)
    attention_kernel[(num_tiles, batch, splits)](
        *(q_latent, q, layer, tables.block_tables, tables.block_tables.stride(0)),
        *(tables.kv_lens, max_len, num_tokens, scale * scales.key * math.log2(math.e), output),
        *(workspace.outputs, workspace.log_sums, splits),
        *((None, 0) if tree is None else (tree.bits, tree.length)),
        tables.rows.offsets,
        scales.key,
        **programmatic_launch(q.device),
        TREE=tree is not None,
        RAGGED=tables.rows.offsets is not None,
        SPLITS=splits > 1,
        WINDOW=window,
        HEADS=heads,
        RANK=rank,
        ROPE=width - rank,
        HEAD_DIM=q.shape[2],
        PAGE_SIZE=page_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        BLOCK_P=block_p,
        WIDEN=q.device.type == "cpu",  # the interpreter cannot multiply bfloat16
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if splits > 1:
        _reduce(output, tables, max_len, block_n, splits, workspace)
    return output


def _reduce(
    output: torch.Tensor,
    tables: LatentTables,
    max_len: int,
    block_n: int,
    splits: int,
    workspace: LatentWorkspace,
) -> None:
    """Joins the partial results of the splits."""
    from tllm_spec.kernels.attention.latent_attention_triton import reduction_kernel

    (heads, num_tokens, rank), own = output.shape, tables.rows
    block_s = power_of_two(splits)
    block_r = min(REDUCED_ELEMENTS // block_s, power_of_two(rank))
    reduction_kernel[(own.num_requests * own.window * heads, -(-rank // block_r))](
        *(workspace.outputs, workspace.log_sums, tables.kv_lens, max_len, num_tokens),
        *(output, splits, own.offsets),
        **programmatic_launch(output.device),
        RAGGED=own.offsets is not None,
        WINDOW=own.window,
        HEADS=heads,
        RANK=rank,
        BLOCK_N=block_n,
        BLOCK_S=block_s,
        BLOCK_R=block_r,
        num_warps=4,
    )


def plain_latent_attention(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    layer: torch.Tensor,
    tables: LatentTables,
    scale: float,
    scales: KVScales = UNSCALED,
) -> torch.Tensor:
    """Reference of `latent_attention`, in float32."""
    rank, (_, page_size, width) = q_latent.shape[2], layer.shape
    own = tables.rows
    keys = torch.arange(tables.block_tables.shape[1] * page_size, device=q.device)
    slots = tables.block_tables[:, keys // page_size] * page_size + keys % page_size  # [B, L]
    absent = keys >= tables.kv_lens[:, None]
    entries = layer.view(-1, width)[slots].float().masked_fill(absent[:, :, None], 0)
    queries = torch.cat((q_latent.transpose(0, 1), q[..., rank - width :]), -1)
    queries = own.padded(queries.float())
    if tables.tree is None:
        firsts = tables.kv_lens - own.counts
        positions = firsts[:, None] + torch.arange(own.window, device=q.device)
        seen = keys <= positions[:, :, None]
    else:
        seen = tables.tree.visible(tables.kv_lens, keys)
    hidden = ~seen | absent[:, None]  # [B, W, L]
    scores = torch.einsum("bwhd,bld->hbwl", queries, entries) * (scale * scales.key)
    # The softmax of a row without keys is NaN; it becomes zeros.
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0)
    mixed = torch.einsum("hbwl,blr->bwhr", weights, entries[..., :rank]) * scales.key
    return own.flat(mixed).transpose(0, 1).to(q.dtype).contiguous()
