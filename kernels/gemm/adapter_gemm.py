"""Low-rank adapters of a linear layer (LoRA, arXiv 2106.09685): `y += B A x` with the matrices of
each row's adapter, which lie in slots. Triton kernels if Triton is available, otherwise the
plain-torch reference, which is the definition.

Rows are sorted by slot, in blocks of one slot each. The first kernel shrinks: all parts of a fused
layer, whose inputs are cut into chunks, with float32 sums. The second adds the chunks in order and
expands, before SwiGLU if the layer has it. So a row's bits do not depend on the other rows, nor on
how many there are. No kernel runs between the two: the second finds its rows and fetches B while
the first still runs.

What at most 8 rows add, the GEMM itself expands (`small_m_gemm`): a layer has one launch more for
each projection. These rows are shrunk one by one: a program takes a whole row, norms it and
multiplies it with some rows of A. Neighbours with the same adapter read A from the L2 cache."""

from dataclasses import dataclass
from typing import Any

import torch

from tllm_spec.kernels.dispatch import has_kernels, tl, triton, with_kernel
from tllm_spec.kernels.experts.grouped_gemm import hit_experts
from tllm_spec.kernels.experts.permute import ExpertRows, moe_permute
from tllm_spec.kernels.gemm.norms import NormWeight, normed_row, rms_norm, silu_and_mul
from tllm_spec.kernels.launch import (
    fetch,
    launch_dependents,
    programmatic_launch,
    wait_for_previous,
)

RANK_STEP = 16  # of a slot's rank; tensor cores multiply as many at a time
TILE_ROWS = 16
# Inputs of a program, whose warps share them: GROUPS sums are added at the end.
CHUNK_BYTES, GROUPS = 2048, 8
BLOCK_OUT = 256
# For each multiprocessor of an H200 3 that shrink and 8 that expand.
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
        """Of the inputs: each has sums of its own."""
        return -(-self.a.shape[2] * self.a.element_size() // CHUNK_BYTES)

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
    `add_adapters`."""
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    sums = x.new_empty(len(x), weights.a.shape[1], dtype=torch.float32)
    for slot, begins, ends in hit_experts(rows):
        mine = rows.order[begins:ends].long()
        sums[mine] = x[mine].float().mm(weights.a[slot // weights.share_a].float().t())
    return Shrunk(weights, rows, sums)


@with_kernel("add_adapters_triton")
def add_adapters(
    x: torch.Tensor,
    weights: AdapterWeights,
    rows: ExpertRows,
    total: torch.Tensor,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """Add `B A x` to `total` in place. `A x` is summed in float32 and rounded to the type of x, the
    rest is rounded once.

    Args:
        x: `[T, K]`, any stride between rows.
        weights: of all slots.
        rows: `sorted_by_slot`. Those without a slot keep their bits.
        total: `[T, N]`, any stride between rows.
        gated: `silu_and_mul` of the sum is returned, `[T, N / 2]`, and `total` may change.
            Otherwise it is returned.
    """
    plain_expand(shrink.reference(x, weights, rows), total, x.dtype)
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


def add_adapters_triton(
    x: torch.Tensor,
    weights: AdapterWeights,
    rows: ExpertRows,
    total: torch.Tensor,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """See `add_adapters`."""
    (num_rows, inputs), (features, step) = x.shape, weights.b.shape[1:]
    assert weights.a.is_contiguous() and weights.b[0].is_contiguous()
    assert x.stride(1) == total.stride(1) == 1 and total.shape == (num_rows, features)
    size = features // 2 if gated else 0
    output = total.new_empty(num_rows, size) if gated else total
    if not num_rows:
        return output
    tiles, chunks = weights.a.shape[1] // RANK_STEP, weights.num_chunks
    room = rows.blocks.shape[1]
    sums = x.new_empty(chunks, num_rows, len(weights.sizes) * step, dtype=torch.float32)
    places = rows.order, rows.blocks, rows.num_blocks, room, num_rows
    shared: dict[str, Any] = {
        "PARTS": len(weights.sizes),
        "STEP": step,
        "TILE_ROWS": TILE_ROWS,
        "RANK_STEP": RANK_STEP,
        "SHARE_A": weights.share_a,
        "SHARE_B": weights.share_b,
        "WIDEN": x.device.type == "cpu",  # the interpreter cannot multiply bfloat16
    }
    shrink_kernel[(min(room * tiles * chunks, MAX_SHRINKS),)](
        *(x, x.stride(0), weights.a, sums, weights.ranks, *places),
        IN=inputs,
        CHUNKS=chunks,
        CHUNK=CHUNK_BYTES // x.element_size(),
        GROUPS=GROUPS,
        **shared,
        **programmatic_launch(x.device, GROUPS),
    )
    block_out = BLOCK_OUT // 2 if gated else BLOCK_OUT
    num_outputs = -(-size // block_out) if gated else len(weights.blocks)
    expand_kernel[(min((room + gated) * num_outputs, MAX_EXPANDS),)](
        *(sums, weights.b, weights.b.stride(0), weights.blocks, num_outputs),
        *(total, total.stride(0), output, weights.ranks, *places),
        CHUNKS=chunks,
        GATED=size,
        BLOCK_OUT=block_out,
        ALIGNED=16 if all(each % 16 == 0 for each in weights.sizes) else 1,
        **shared,
        **programmatic_launch(x.device, 4),
    )
    return output


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


@triton.jit(do_not_specialize=["room", "num_rows"])
def shrink_kernel(
    x: tl.tensor, x_stride: tl.tensor, a: tl.tensor, sums: tl.tensor, ranks: tl.tensor,
    order: tl.tensor, blocks: tl.tensor, num_blocks: tl.tensor, room: tl.tensor,
    num_rows: tl.tensor, IN: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    GROUPS: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, TILE_ROWS: tl.constexpr,
    RANK_STEP: tl.constexpr, SHARE_A: tl.constexpr, SHARE_B: tl.constexpr, WIDEN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Programs share the blocks of rows times RANK_STEP ranks of a part times chunks of inputs. The
    next kernel, which expands, may read what was written before this one."""
    wait_for_previous(PDL)
    launch_dependents(PDL)
    dot_type: tl.constexpr = tl.float32 if WIDEN else x.dtype.element_ty
    tiles: tl.constexpr = PARTS * STEP // RANK_STEP
    within = tl.arange(0, GROUPS)[:, None, None] * (CHUNK // GROUPS)
    within += tl.arange(0, CHUNK // GROUPS)[None, None, :]
    num_items = tl.load(num_blocks) * (tiles * CHUNKS)
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        block, chunk = item // (tiles * CHUNKS), item % CHUNKS
        rank = item // CHUNKS % tiles * RANK_STEP
        slot, end = tl.load(blocks + block), tl.load(blocks + 2 * room + block)
        places = tl.load(blocks + room + block) + tl.arange(0, TILE_ROWS)
        used = tl.load(ranks + slot // max(SHARE_A, SHARE_B) * PARTS + rank // STEP)
        if rank % STEP < used:
            real = places < end
            rows = tl.load(order + places, mask=real, other=0).to(tl.int64)
            columns = rank + tl.arange(0, RANK_STEP)
            k = chunk * CHUNK + within
            a_rows = ((slot // SHARE_A).to(tl.int64) * PARTS * STEP + columns) * IN
            weights = tl.load(a + a_rows[None, :, None] + k, mask=k < IN, other=0.0)
            sources = x + rows[None, :, None] * x_stride + k
            values = tl.load(sources, mask=real[None, :, None] & (k < IN), other=0.0)
            total = tl.dot(
                values.to(dot_type),
                tl.permute(weights, (0, 2, 1)).to(dot_type),
                input_precision="ieee",
            )
            targets = (chunk * num_rows + rows)[:, None] * (PARTS * STEP) + columns[None, :]
            tl.store(sums + targets, tl.sum(total, 0), mask=real[:, None])


@triton.jit
def _expanded(
    values: tl.tensor, sums: tl.tensor, b: tl.tensor, rank: tl.tensor, rows: tl.tensor,
    outs: tl.tensor, real: tl.tensor, inside: tl.tensor, num_rows: tl.tensor,
    CHUNKS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, RANK_STEP: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The values and B A x of the rows and outputs, rounded. sums, b: of the part and slot."""
    b_type: tl.constexpr = b.dtype.element_ty
    dot_type: tl.constexpr = tl.float32 if WIDEN else b_type
    added = tl.zeros(values.shape, tl.float32)
    for start in tl.range(0, rank, RANK_STEP):
        r = start + tl.arange(0, RANK_STEP)
        weights = tl.load(b + outs[None, :] * STEP + r[:, None], mask=inside[None, :], other=0.0)
        shrunk = tl.zeros([rows.shape[0], RANK_STEP], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            sources = (chunk * num_rows + rows)[:, None] * WIDTH + r[None, :]
            shrunk += tl.load(sums + sources, mask=real[:, None], other=0.0)
        shrunk = shrunk.to(b_type).to(dot_type)
        added = tl.dot(shrunk, weights.to(dot_type), added, input_precision="ieee")
    rounded = (values.to(tl.float32) + added).to(values.dtype)
    return tl.where(rank > 0, rounded, values)


@triton.jit
def _fetch_b(
    b: tl.tensor, b_stride: tl.tensor, outputs: tl.tensor, num_outputs: tl.tensor,
    blocks: tl.tensor, num_blocks: tl.tensor, GATED: tl.constexpr, BLOCK_OUT: tl.constexpr,
    STEP: tl.constexpr, SHARE_B: tl.constexpr,
) -> None:  # fmt: skip
    """Fetches what the program's first item reads of B into the L2 cache. The shrink, which is the
    previous kernel, has waited: blocks are those of this forward."""
    block, own = tl.program_id(0) // num_outputs, tl.program_id(0) % num_outputs
    columns = tl.arange(0, BLOCK_OUT)
    if block < tl.load(num_blocks):
        b_slot = b + (tl.load(blocks + block) // SHARE_B).to(tl.int64) * b_stride
        if GATED > 0:
            outs = tl.minimum(own * BLOCK_OUT + columns, GATED - 1)
            fetch(b_slot + outs * STEP)
            fetch(b_slot + (GATED + outs) * STEP)
        else:
            outs = tl.load(outputs + own * 3 + 1) + columns
            fetch(b_slot + tl.minimum(outs, tl.load(outputs + own * 3 + 2) - 1) * STEP)


@triton.jit(do_not_specialize=["room", "num_rows", "num_outputs"])
def expand_kernel(
    sums: tl.tensor, b: tl.tensor, b_stride: tl.tensor, outputs: tl.tensor, num_outputs: tl.tensor,
    total: tl.tensor, total_stride: tl.tensor, output: tl.tensor, ranks: tl.tensor,
    order: tl.tensor, blocks: tl.tensor, num_blocks: tl.tensor, room: tl.tensor,
    num_rows: tl.tensor, CHUNKS: tl.constexpr, GATED: tl.constexpr, BLOCK_OUT: tl.constexpr,
    ALIGNED: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, TILE_ROWS: tl.constexpr,
    RANK_STEP: tl.constexpr, SHARE_A: tl.constexpr, SHARE_B: tl.constexpr, WIDEN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Programs share the blocks of rows times those of outputs. GATED: outputs of SwiGLU, or 0;
    with it rows without a slot, which are the last ones, follow in blocks of their own."""
    launch_dependents(PDL)
    if PDL:
        _fetch_b(
            b, b_stride, outputs, num_outputs, blocks, num_blocks, GATED, BLOCK_OUT, STEP, SHARE_B
        )
    wait_for_previous(PDL)
    number, columns = tl.load(num_blocks), tl.arange(0, BLOCK_OUT)
    num_adapted, all_blocks = 0, number
    if GATED > 0:
        num_adapted = tl.load(blocks + 2 * room + tl.maximum(number - 1, 0))
        num_adapted = tl.where(number > 0, num_adapted, 0)
        all_blocks += tl.cdiv(num_rows - num_adapted, TILE_ROWS)
    for item in tl.range(tl.program_id(0), all_blocks * num_outputs, tl.num_programs(0)):
        block, own = item // num_outputs, item % num_outputs
        is_adapted, place = block < number, blocks + tl.minimum(block, room - 1)
        slot = tl.where(is_adapted, tl.load(place), 0)
        first = num_adapted + (block - number) * TILE_ROWS
        places = tl.where(is_adapted, tl.load(place + room), first) + tl.arange(0, TILE_ROWS)
        real = places < tl.where(is_adapted, tl.load(place + 2 * room), num_rows)
        rows = tl.load(order + places, mask=real, other=0).to(tl.int64)
        own_ranks = ranks + slot // max(SHARE_A, SHARE_B) * PARTS
        b_slot = b + (slot // SHARE_B).to(tl.int64) * b_stride
        if GATED > 0:
            outs, inside = own * BLOCK_OUT + columns, own * BLOCK_OUT + columns < GATED
            kept = real[:, None] & inside[None, :]
            targets = total + rows[:, None] * total_stride + outs[None, :]
            gate = tl.load(targets, mask=kept, other=0.0)
            up = tl.load(targets + GATED, mask=kept, other=0.0)
            rank = tl.where(is_adapted, tl.load(own_ranks), 0)
            gate = _expanded(
                gate, sums, b_slot, rank, rows, outs, real, inside, num_rows, CHUNKS, PARTS * STEP,
                STEP, RANK_STEP, WIDEN,
            ).to(tl.float32)  # fmt: skip
            rank = tl.where(is_adapted, tl.load(own_ranks + PARTS - 1), 0)
            up = _expanded(
                up, sums + (PARTS - 1) * STEP, b_slot + GATED * STEP, rank, rows, outs, real,
                inside, num_rows, CHUNKS, PARTS * STEP, STEP, RANK_STEP, WIDEN,
            )  # fmt: skip
            gate = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
            targets = output + rows[:, None] * GATED + outs[None, :]
            tl.store(targets, gate.to(up.dtype), mask=kept)
        else:
            part = tl.load(outputs + own * 3)
            outs = tl.multiple_of(tl.load(outputs + own * 3 + 1), ALIGNED) + columns
            inside = outs < tl.multiple_of(tl.load(outputs + own * 3 + 2), ALIGNED)
            rank = tl.load(own_ranks + part)
            if rank > 0:
                kept = real[:, None] & inside[None, :]
                targets = total + rows[:, None] * total_stride + outs[None, :]
                values = tl.load(targets, mask=kept, other=0.0)
                values = _expanded(
                    values, sums + part * STEP, b_slot, rank, rows, outs, real, inside, num_rows,
                    CHUNKS, PARTS * STEP, STEP, RANK_STEP, WIDEN,
                )  # fmt: skip
                tl.store(targets, values, mask=kept)
