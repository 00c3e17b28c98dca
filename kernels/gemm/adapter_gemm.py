"""Low-rank adapters of a linear layer (LoRA, arXiv 2106.09685): `y += B A x` with the matrices of
each row's adapter, which lie in slots. Triton kernels if Triton is available, otherwise the
plain-torch reference, which is the definition.

Rows are sorted by slot, in blocks of one slot each. The first kernel shrinks: all parts of a fused
layer, whose inputs are cut into chunks, with float32 sums. The second adds the chunks in order and
expands, before SwiGLU if the layer has it. So a row's bits do not depend on the other rows, nor on
how many there are. In a CUDA graph the first runs on a stream of its own, next to the layer's GEMM.

What at most 8 rows add, the GEMM itself expands (`small_m_gemm`): a layer has one launch more for
each projection. These rows are shrunk one by one: a program takes a whole row, norms it and
multiplies it with some rows of A. Neighbours with the same adapter read A from the L2 cache."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tllm_spec.kernels.dispatch import has_kernels, tl, triton, with_kernel
from tllm_spec.kernels.experts.grouped_gemm import hit_experts
from tllm_spec.kernels.experts.permute import ExpertRows, moe_permute
from tllm_spec.kernels.gemm.norms import NormWeight, normed_row, rms_norm, silu_and_mul
from tllm_spec.kernels.launch import launch_dependents, programmatic_launch, wait_for_previous

RANK_STEP = 16  # of a slot's rank; tensor cores multiply as many at a time
TILE_ROWS = 16
# Inputs of a program, and those that its warps share at a time: GROUPS sums are added at the end.
CHUNK, STEP_BYTES, GROUPS = 4096, 2048, 8
BLOCK_OUT = 128
# Programs of a launch, at most: for each multiprocessor of an H200 3 that shrink, 8 that expand.
MAX_SHRINKS, MAX_EXPANDS = 396, 1056
# Of rows that are shrunk one by one: ranks and elements of one program.
MAX_INPUTS, FEW_RANKS, ELEMENTS_PER_WARP = 32768, 2, 512


@dataclass(frozen=True)
class AdapterWeights:
    """The low-rank matrices of a layer in S slots. Its outputs are P parts, one after another."""

    a: torch.Tensor
    """`[S, P * R, K]` of the type of x, contiguous; R is a multiple of RANK_STEP. The rows of a
    part after the rank, up to the next multiple, are 0."""
    b: torch.Tensor
    """`[S, N, R]`, times the scale; any stride between slots."""
    ranks: torch.Tensor
    """`[S, P]` int32, contiguous: how many of R each part uses; 0: it has no adapter."""
    blocks: torch.Tensor
    """`[num_blocks, 3]` int32: part, first output and end of up to BLOCK_OUT outputs. See
    `output_blocks`."""
    sizes: tuple[int, ...]
    """Outputs of each part."""
    share_a: int = 1
    share_b: int = 1
    """Neighbouring slots that have one matrix. The ranks are of the larger number."""

    @property
    def step(self) -> int:
        """R."""
        return self.b.shape[2]

    @property
    def num_chunks(self) -> int:
        """Each part of the inputs has sums of its own."""
        return -(-self.a.shape[2] // CHUNK)

    @property
    def fit_one_by_one(self) -> bool:
        """Whether a program can shrink a whole row."""
        return self.a.shape[2] <= MAX_INPUTS and self.share_a == self.share_b == 1


def padded_rank(rank: int) -> int:
    """The next multiple of RANK_STEP."""
    return -(-rank // RANK_STEP) * RANK_STEP


def output_blocks(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """`AdapterWeights.blocks` for parts of these sizes."""
    blocks, first = [], 0
    for part, size in enumerate(sizes):
        end = first + size
        blocks += [
            (part, start, min(start + BLOCK_OUT, end)) for start in range(first, end, BLOCK_OUT)
        ]
        first = end
    return torch.tensor(blocks, dtype=torch.int32, device=device)


def sorted_by_slot(slots: torch.Tensor, num_slots: int) -> ExpertRows:
    """The rows with slots `[T]` int32, contiguous; those of -1, which have none, are in no
    block."""
    block_rows = TILE_ROWS if has_kernels(slots.device) else max(len(slots), 1)
    return moe_permute(slots.unsqueeze(1), num_slots, block_rows, 0)


@dataclass(frozen=True)
class Shrunk:
    """`A x` of a layer's rows."""

    weights: AdapterWeights
    rows: ExpertRows
    """`sorted_by_slot`."""
    sums: torch.Tensor
    """`[T, P * R]` float32. Undefined for rows without a slot, and after a part's rank, padded to a
    multiple of RANK_STEP."""

    @property
    def slots(self) -> torch.Tensor:
        """`[T]` int32: of each row, -1: it has none."""
        return self.rows.experts.flatten()


@with_kernel("shrink_rows")
def shrink(
    x: torch.Tensor, weights: AdapterWeights, rows: ExpertRows, norm: NormWeight | None = None
) -> Shrunk:
    """`A norm(x)`, or of x, for the few rows whose GEMM expands; x, weights, rows: as of
    `with_adapters`."""
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    sums = x.new_empty(len(x), weights.a.shape[1], dtype=torch.float32)
    for slot, begins, ends in hit_experts(rows):
        mine = rows.order[begins:ends].long()
        sums[mine] = x[mine].float().mm(weights.a[slot // weights.share_a].float().t())
    return Shrunk(weights, rows, sums)


@with_kernel("with_adapters_triton")
def with_adapters(
    x: torch.Tensor,
    weights: AdapterWeights,
    rows: ExpertRows,
    gemm: Callable[[], torch.Tensor],
    *,
    gated: bool = False,
) -> torch.Tensor:
    """Add `B A x` to what the layer's GEMM returns, in place. `A x` is summed in float32 and
    rounded to the type of x, the rest is rounded once. In a CUDA graph the GEMM and the shrink may
    run at the same time.

    Args:
        x: `[T, K]`, any stride between rows.
        weights: of all slots.
        rows: `sorted_by_slot`. Those without a slot keep their bits.
        gemm: returns the total `[T, N]`, any stride between rows.
        gated: returns `silu_and_mul` of the sum, `[T, N / 2]`; the total may change.
    """
    total = plain_expand(shrink.reference(x, weights, rows), gemm(), x.dtype)
    return silu_and_mul.reference(total) if gated else total


def plain_expand(shrunk: Shrunk, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Adds `B s` to total `[T, N]`, in place; s is rounded to the dtype."""
    weights, rows = shrunk.weights, shrunk.rows
    step, number = weights.step, max(weights.share_a, weights.share_b)
    for slot, begins, ends in hit_experts(rows):
        mine, first = rows.order[begins:ends].long(), 0
        ranks, sums = weights.ranks[slot // number].tolist(), shrunk.sums[mine].to(dtype)
        for part, (rank, size) in enumerate(zip(ranks, weights.sizes, strict=True)):
            outputs, first = slice(first, first + size), first + size
            if rank:
                own = sums[:, part * step : part * step + rank].float()
                delta = own.mm(weights.b[slot // weights.share_b, outputs, :rank].float().t())
                total[mine, outputs] = (total[mine, outputs].float() + delta).to(total.dtype)
    return total


def shrink_rows(
    x: torch.Tensor, weights: AdapterWeights, rows: ExpertRows, norm: NormWeight | None = None
) -> Shrunk:
    """See `shrink`. Each row by itself."""
    assert weights.a.is_contiguous() and weights.fit_one_by_one and x.stride(1) == 1
    num_rows, inputs = x.shape
    ranks, block = weights.a.shape[1], triton.next_power_of_2(inputs)
    sums = x.new_empty(num_rows, ranks, dtype=torch.float32)
    shrink_rows_kernel[(ranks // FEW_RANKS, num_rows)](
        *(x, x.stride(0)),
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        *(weights.a, weights.ranks, len(weights.ranks), rows.experts, sums),
        IN=inputs,
        BLOCK=block,
        PARTS=len(weights.sizes),
        STEP=weights.step,
        RANKS=FEW_RANKS,
        RANK_STEP=RANK_STEP,
        **programmatic_launch(x.device, max(1, min(block // ELEMENTS_PER_WARP, 16))),
    )
    return Shrunk(weights, rows, sums)


def with_adapters_triton(
    x: torch.Tensor,
    weights: AdapterWeights,
    rows: ExpertRows,
    gemm: Callable[[], torch.Tensor],
    *,
    gated: bool = False,
) -> torch.Tensor:
    """See `with_adapters`."""
    width = len(weights.sizes) * weights.step
    sums = x.new_empty(weights.num_chunks, len(x), width, dtype=torch.float32)
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        main, side = torch.cuda.current_stream(x.device), _side_stream(x.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            _shrink(x, weights, rows, sums)
        total = gemm()
        main.wait_stream(side)
    else:
        total = gemm()
        _shrink(x, weights, rows, sums)
    return _expand(sums, weights, rows, total, gated)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _shrink(x: torch.Tensor, weights: AdapterWeights, rows: ExpertRows, sums: torch.Tensor) -> None:
    """Writes `A x` of each chunk of inputs to sums `[C, T, P * R]`."""
    assert weights.a.is_contiguous() and x.stride(1) == 1
    items = rows.blocks.shape[1] * (sums.shape[2] // RANK_STEP) * len(sums)
    if len(x):
        shrink_kernel[(min(items, MAX_SHRINKS),)](
            *(x, x.stride(0), weights.a, sums, weights.ranks, *_places(rows)),
            IN=x.shape[1],
            CHUNK=CHUNK,
            BLOCK_IN=STEP_BYTES // x.element_size(),
            GROUPS=GROUPS,
            **_options(weights, x.device),
            num_warps=GROUPS,
            enable_fp_fusion=True,
        )


def _expand(
    sums: torch.Tensor, weights: AdapterWeights, rows: ExpertRows, total: torch.Tensor, gated: bool
) -> torch.Tensor:
    """Adds `B s` to the total; sums: as of `_shrink`."""
    (num_rows, features), size = total.shape, total.shape[1] // 2 if gated else 0
    assert weights.b[0].is_contiguous() and total.stride(1) == 1
    assert (num_rows, features) == (sums.shape[1], weights.b.shape[1])
    output = total.new_empty(num_rows, size) if gated else total
    block_out = BLOCK_OUT // 2 if gated else BLOCK_OUT
    num_outputs = -(-size // block_out) if gated else len(weights.blocks)
    if num_rows:
        expand_kernel[(min((rows.blocks.shape[1] + gated) * num_outputs, MAX_EXPANDS),)](
            *(sums, weights.b, weights.b.stride(0), weights.blocks, num_outputs),
            *(total, total.stride(0), output, weights.ranks, *_places(rows)),
            CHUNKS=len(sums),
            GATED=size,
            BLOCK_OUT=block_out,
            ALIGNED=16 if all(each % 16 == 0 for each in weights.sizes) else 1,
            **_options(weights, total.device),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return output


def _places(rows: ExpertRows) -> tuple[Any, ...]:
    return rows.order, rows.blocks, rows.num_blocks, rows.blocks.shape[1], len(rows.experts)


def _options(weights: AdapterWeights, device: torch.device) -> dict[str, Any]:
    """Constants of both kernels."""
    return {
        "PARTS": len(weights.sizes),
        "STEP": weights.step,
        "TILE_ROWS": TILE_ROWS,
        "RANK_STEP": RANK_STEP,
        "SHARE_A": weights.share_a,
        "SHARE_B": weights.share_b,
        "WIDEN": device.type == "cpu",  # the interpreter cannot multiply bfloat16
    }


@triton.jit
def _own_rows(
    a: tl.tensor, ranks: tl.tensor, slot: tl.tensor, num_slots: tl.tensor, rank: tl.tensor,
    columns: tl.tensor, IN: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr,
    RANKS: tl.constexpr, RANK_STEP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """RANKS rows of the slot's A, `[RANKS, BLOCK]`, and whether its adapter has them."""
    is_slot = (slot >= 0) & (slot < num_slots)
    slot = tl.where(is_slot, slot, 0)
    used = tl.load(ranks + slot * PARTS + rank // STEP)
    used = tl.where(is_slot, tl.cdiv(used, RANK_STEP) * RANK_STEP, 0)
    has_rank = rank % STEP < used
    rows = (slot.to(tl.int64) * PARTS * STEP + rank + tl.arange(0, RANKS)) * IN
    kept = (columns < tl.where(has_rank, IN, 0))[None, :]
    return tl.load(a + rows[:, None] + columns[None, :], mask=kept, other=0.0), has_rank


@triton.jit(do_not_specialize=["num_slots"])
def shrink_rows_kernel(
    x: tl.tensor, x_stride: tl.tensor, norm: tl.tensor, eps: tl.tensor, a: tl.tensor,
    ranks: tl.tensor, num_slots: tl.tensor, slots: tl.tensor, sums: tl.tensor,
    IN: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr,
    RANKS: tl.constexpr, RANK_STEP: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (RANKS ranks of a part, rows). Matrices are read while the previous kernel runs, and
    again if only after it the row has its slot; before, it may have any number."""
    launch_dependents(PDL)
    rank, row, columns = tl.program_id(0) * RANKS, tl.program_id(1), tl.arange(0, BLOCK)
    real, before = columns < IN, tl.load(slots + row)
    own, has_rank = _own_rows(
        a, ranks, before, num_slots, rank, columns, IN, PARTS, STEP, RANKS, RANK_STEP
    )
    if norm is not None:
        factors = tl.load(norm + columns, mask=real, other=0.0)
    wait_for_previous(PDL)
    values = tl.load(x + row.to(tl.int64) * x_stride + columns, mask=real, other=0.0)
    slot = tl.load(slots + row, volatile=True)
    if slot != before:
        own, has_rank = _own_rows(
            a, ranks, slot, num_slots, rank, columns, IN, PARTS, STEP, RANKS, RANK_STEP
        )
    if norm is not None:
        values = normed_row(values, factors, eps, IN).to(values.dtype)
    if has_rank:
        total = tl.sum(own.to(tl.float32) * values.to(tl.float32)[None, :], 1)
        tl.store(sums + row * (PARTS * STEP) + rank + tl.arange(0, RANKS), total)


@triton.jit
def _block_of(
    blocks: tl.tensor, block: tl.tensor, room: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Slot, first sorted row and end of a block; undefined after the last one."""
    own = blocks + tl.minimum(block, room - 1)
    return tl.load(own), tl.load(own + room), tl.load(own + 2 * room)


# Most of a kernel's time is a chain of loads that depend on each other. So a program loads where
# its first block is before it knows how many there are, and the next one while it multiplies.


@triton.jit(do_not_specialize=["room", "num_rows"])
def shrink_kernel(
    x: tl.tensor, x_stride: tl.tensor, a: tl.tensor, sums: tl.tensor, ranks: tl.tensor,
    order: tl.tensor, blocks: tl.tensor, num_blocks: tl.tensor, room: tl.tensor,
    num_rows: tl.tensor, IN: tl.constexpr, CHUNK: tl.constexpr, BLOCK_IN: tl.constexpr,
    GROUPS: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, TILE_ROWS: tl.constexpr,
    RANK_STEP: tl.constexpr, SHARE_A: tl.constexpr, SHARE_B: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Programs share the blocks of rows times RANK_STEP ranks of a part times chunks."""
    dot_type: tl.constexpr = tl.float32 if WIDEN else x.dtype.element_ty
    chunks: tl.constexpr = (IN + CHUNK - 1) // CHUNK
    tiles: tl.constexpr = PARTS * STEP // RANK_STEP
    within = tl.arange(0, GROUPS)[:, None, None] * (BLOCK_IN // GROUPS)
    within += tl.arange(0, BLOCK_IN // GROUPS)[None, None, :]
    number = tl.load(num_blocks)
    slot, first, end = _block_of(blocks, tl.program_id(0) // (tiles * chunks), room)
    items = number * (tiles * chunks)
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), num_stages=1):
        rank, chunk = item // chunks % tiles * RANK_STEP, item % chunks
        used = STEP  # the first ranks of a part without an adapter are computed in vain
        if rank % STEP > 0:
            used = tl.load(ranks + slot // max(SHARE_A, SHARE_B) * PARTS + rank // STEP)
        if rank % STEP < used:
            places = first + tl.arange(0, TILE_ROWS)
            real = places < end
            rows = tl.load(order + places, mask=real, other=0).to(tl.int64)
            columns = rank + tl.arange(0, RANK_STEP)
            a_rows = ((slot // SHARE_A).to(tl.int64) * PARTS * STEP + columns) * IN
            total = tl.zeros([GROUPS, TILE_ROWS, RANK_STEP], tl.float32)
            last = tl.minimum((chunk + 1) * CHUNK, IN)
            for start in tl.range(chunk * CHUNK, last, BLOCK_IN, num_stages=2):
                k = start + within
                weights = tl.load(a + a_rows[None, :, None] + k, mask=k < IN, other=0.0)
                sources = x + rows[None, :, None] * x_stride + k
                values = tl.load(sources, mask=real[None, :, None] & (k < IN), other=0.0)
                weights = tl.permute(weights, (0, 2, 1)).to(dot_type)
                total = tl.dot(values.to(dot_type), weights, total, input_precision="ieee")
            targets = (chunk * num_rows + rows)[:, None] * (PARTS * STEP) + columns[None, :]
            tl.store(sums + targets, tl.sum(total, 0), mask=real[:, None])
        slot, first, end = _block_of(blocks, (item + tl.num_programs(0)) // (tiles * chunks), room)


@triton.jit
def _outputs_of(
    outputs: tl.tensor, own: tl.tensor, GATED: tl.constexpr, BLOCK_OUT: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The part, and the outputs of an item, with which of them there are."""
    columns = tl.arange(0, BLOCK_OUT)
    if GATED > 0:
        part, outs, end = 0, own * BLOCK_OUT + columns, GATED
    else:
        part = tl.load(outputs + own * 3)
        outs = tl.multiple_of(tl.load(outputs + own * 3 + 1), ALIGNED) + columns
        end = tl.multiple_of(tl.load(outputs + own * 3 + 2), ALIGNED)
    return part, outs, outs < end


@triton.jit
def _factors(
    sums: tl.tensor, b: tl.tensor, first: tl.tensor, rows: tl.tensor, outs: tl.tensor,
    real: tl.tensor, inside: tl.tensor, num_rows: tl.tensor, CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, RANK_STEP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """RANK_STEP ranks from `first` on: the rows' sums over all chunks, and `[ranks, outputs]` of B.
    sums, b: of the part and slot."""
    r = first + tl.arange(0, RANK_STEP)
    weights = tl.load(b + outs[None, :] * STEP + r[:, None], mask=inside[None, :], other=0.0)
    shrunk = tl.zeros([rows.shape[0], RANK_STEP], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        sources = (chunk * num_rows + rows)[:, None] * WIDTH + r[None, :]
        shrunk += tl.load(sums + sources, mask=real[:, None], other=0.0)
    return shrunk, weights


@triton.jit
def _expanded(
    values: tl.tensor, shrunk: tl.tensor, weights: tl.tensor, rank: tl.tensor, sums: tl.tensor,
    b: tl.tensor, rows: tl.tensor, outs: tl.tensor, real: tl.tensor, inside: tl.tensor,
    num_rows: tl.tensor, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    RANK_STEP: tl.constexpr, WIDEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The values and B A x of the rows and outputs, rounded. shrunk, weights: the first ranks."""
    b_type: tl.constexpr = b.dtype.element_ty
    dot_type: tl.constexpr = tl.float32 if WIDEN else b_type
    shrunk = shrunk.to(b_type).to(dot_type)
    added = tl.dot(shrunk, weights.to(dot_type), input_precision="ieee")
    if STEP > RANK_STEP:
        for start in tl.range(RANK_STEP, rank, RANK_STEP):
            shrunk, weights = _factors(
                sums, b, start, rows, outs, real, inside, num_rows, CHUNKS, WIDTH, STEP, RANK_STEP
            )
            shrunk = shrunk.to(b_type).to(dot_type)
            added = tl.dot(shrunk, weights.to(dot_type), added, input_precision="ieee")
    rounded = (values.to(tl.float32) + added).to(values.dtype)
    return tl.where(rank > 0, rounded, values)


@triton.jit(do_not_specialize=["room", "num_rows", "num_outputs"])
def expand_kernel(
    sums: tl.tensor, b: tl.tensor, b_stride: tl.tensor, outputs: tl.tensor, num_outputs: tl.tensor,
    total: tl.tensor, total_stride: tl.tensor, output: tl.tensor, ranks: tl.tensor,
    order: tl.tensor, blocks: tl.tensor, num_blocks: tl.tensor, room: tl.tensor,
    num_rows: tl.tensor, CHUNKS: tl.constexpr, GATED: tl.constexpr, BLOCK_OUT: tl.constexpr,
    ALIGNED: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, TILE_ROWS: tl.constexpr,
    RANK_STEP: tl.constexpr, SHARE_A: tl.constexpr, SHARE_B: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Programs share the blocks of rows times those of outputs. GATED: outputs of SwiGLU, or 0;
    with it rows without a slot, which are the last ones, follow in blocks of their own."""
    number, width, num_adapted = tl.load(num_blocks), PARTS * STEP, 0
    slot, first, end = _block_of(blocks, tl.program_id(0) // num_outputs, room)
    items = number * num_outputs
    if GATED > 0:
        num_adapted = tl.where(number > 0, _block_of(blocks, tl.maximum(number - 1, 0), room)[2], 0)
        items += tl.cdiv(num_rows - num_adapted, TILE_ROWS) * num_outputs
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), num_stages=1):
        block = item // num_outputs
        is_adapted = block < number
        slot = tl.where(is_adapted, slot, 0)
        places = tl.where(is_adapted, first, num_adapted + (block - number) * TILE_ROWS)
        places += tl.arange(0, TILE_ROWS)
        real = places < tl.where(is_adapted, end, num_rows)
        rows = tl.load(order + places, mask=real, other=0).to(tl.int64)
        part, outs, inside = _outputs_of(outputs, item % num_outputs, GATED, BLOCK_OUT, ALIGNED)
        own_ranks = ranks + slot // max(SHARE_A, SHARE_B) * PARTS
        rank = tl.where(is_adapted, tl.load(own_ranks + part), 0)
        b_slot = b + (slot // SHARE_B).to(tl.int64) * b_stride
        kept = real[:, None] & inside[None, :]
        targets = total + rows[:, None] * total_stride + outs[None, :]
        values, sums_part = tl.load(targets, mask=kept, other=0.0), sums + part * STEP
        shrunk, weights = _factors(
            sums_part, b_slot, 0, rows, outs, real, inside, num_rows, CHUNKS, width, STEP, RANK_STEP
        )
        if GATED > 0:  # everything is loaded before anything is multiplied
            ups = tl.load(targets + GATED, mask=kept, other=0.0)
            up_rank = tl.where(is_adapted, tl.load(own_ranks + PARTS - 1), 0)
            b_up, sums_up = b_slot + GATED * STEP, sums + (PARTS - 1) * STEP
            up_shrunk, up_weights = _factors(
                sums_up, b_up, 0, rows, outs, real, inside, num_rows, CHUNKS, width, STEP, RANK_STEP
            )
        values = _expanded(
            values, shrunk, weights, rank, sums_part, b_slot, rows, outs, real, inside, num_rows,
            CHUNKS, width, STEP, RANK_STEP, WIDEN,
        )  # fmt: skip
        if GATED > 0:
            ups = _expanded(
                ups, up_shrunk, up_weights, up_rank, sums_up, b_up, rows, outs, real, inside,
                num_rows, CHUNKS, width, STEP, RANK_STEP, WIDEN,
            )  # fmt: skip
            values = values.to(tl.float32)
            values = (values / (1.0 + tl.exp(-values)) * ups.to(tl.float32)).to(ups.dtype)
            targets = output + rows[:, None] * GATED + outs[None, :]
        tl.store(targets, values, mask=kept)
        slot, first, end = _block_of(blocks, (item + tl.num_programs(0)) // num_outputs, room)
