"""Low-rank adapters of a linear layer (LoRA, arXiv 2106.09685): `y += B A x` with the matrices of
each row's adapter, which lie in slots. Triton kernels if Triton is available, otherwise the
plain-torch reference, which is the definition.

Rows are sorted by slot, in blocks of one slot each. The first kernel shrinks: all parts of a fused
layer, whose inputs are cut into chunks of CHUNK, with float32 sums. The second adds the chunks in
order and expands, before SwiGLU if the layer has it. So a row's bits do not depend on the other
rows, nor on how many there are.

Where a layer's own GEMM has another order of sums for few rows, they may be shrunk `one_by_one`: a
program takes a whole row, norms it and multiplies it with some rows of A. Neighbours with the same
adapter then read A from the L2 cache. What at most 8 rows add, the GEMM itself expands
(`small_m_gemm`): a layer has one launch more for each projection."""

from dataclasses import dataclass
from typing import Any

import torch

from tllm_spec.kernels.dispatch import has_kernels, tl, triton, with_kernel
from tllm_spec.kernels.experts.grouped_gemm import hit_experts
from tllm_spec.kernels.experts.permute import ExpertRows, moe_permute
from tllm_spec.kernels.gemm.norms import NormWeight, normed_row, rms_norm, silu_and_mul
from tllm_spec.kernels.launch import (
    begin,
    launch_dependents,
    programmatic_launch,
    wait_for_previous,
)

RANK_STEP = 16  # of a slot's rank; tensor cores multiply as many at a time
TILE_ROWS = 16
CHUNK, BLOCK_IN = 1024, 128
BLOCK_OUT = 256
MAX_PROGRAMS = 1056  # that expand: 8 for each multiprocessor of an H200
# Rows that are shrunk one by one; ranks and elements of one program.
FEW_ROWS, MAX_INPUTS = 64, 32768
RANKS, FEW_RANKS, MAX_FEW, ELEMENTS_PER_WARP = 4, 2, 8, 512


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
    x: torch.Tensor
    """`[T, K]`: what A was multiplied with."""
    sums: torch.Tensor
    """`[C, T, P * R]` float32, of C chunks of the inputs. Undefined for rows without a slot, and
    after a part's rank, padded to a multiple of RANK_STEP."""

    @property
    def slots(self) -> torch.Tensor:
        """`[T]` int32: of each row, -1: it has none."""
        return self.rows.experts.flatten()


def add_adapters(
    x: torch.Tensor, weights: AdapterWeights, rows: ExpertRows, total: torch.Tensor
) -> None:
    """Add `B A x` to `total` in place. `A x` is summed in float32 and rounded to the type of x, the
    rest is rounded once.

    Args:
        x: `[T, K]`, any stride between rows.
        weights: of all slots.
        rows: `sorted_by_slot`. Those without a slot keep their bits.
        total: `[T, N]`, any stride between rows.
    """
    expand(shrink(x, weights, rows), total)


@with_kernel("shrink_triton")
def shrink(
    x: torch.Tensor,
    weights: AdapterWeights,
    rows: ExpertRows,
    norm: NormWeight | None = None,
    *,
    one_by_one: bool = False,
    keeps_norm: bool = True,
) -> Shrunk:
    """`A norm(x)`, or of x.

    Args:
        x, weights, rows: as of `add_adapters`.
        one_by_one: each of few rows may read a matrix for itself, which is faster. Then the order
            of sums depends on the number of rows.
        keeps_norm: otherwise the result's x may be that without the norm.
    """
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    sums = x.new_empty(1, len(x), weights.a.shape[1], dtype=torch.float32)
    for slot, begins, ends in hit_experts(rows):
        mine = rows.order[begins:ends].long()
        sums[0, mine] = x[mine].float().mm(weights.a[slot // weights.share_a].float().t())
    return Shrunk(weights, rows, x, sums)


@with_kernel("expand_triton", 1)
def expand(shrunk: Shrunk, total: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
    """Adds `B s` to total `[T, N]`, in place; gated: `silu_and_mul` of the sum, `[T, N / 2]`, and
    total may change."""
    weights, rows, x = shrunk.weights, shrunk.rows, shrunk.x
    step, number = weights.step, max(weights.share_a, weights.share_b)
    for slot, begins, ends in hit_experts(rows):
        mine, first = rows.order[begins:ends].long(), 0
        ranks, sums = weights.ranks[slot // number].tolist(), shrunk.sums[0, mine].to(x.dtype)
        for part, (rank, size) in enumerate(zip(ranks, weights.sizes, strict=True)):
            outputs, first = slice(first, first + size), first + size
            if rank:
                own = sums[:, part * step : part * step + rank].float()
                delta = own.mm(weights.b[slot // weights.share_b, outputs, :rank].float().t())
                total[mine, outputs] = (total[mine, outputs].float() + delta).to(total.dtype)
    return silu_and_mul.reference(total) if gated else total


def shrink_triton(
    x: torch.Tensor,
    weights: AdapterWeights,
    rows: ExpertRows,
    norm: NormWeight | None = None,
    *,
    one_by_one: bool = False,
    keeps_norm: bool = True,
) -> Shrunk:
    """See `shrink`."""
    assert weights.a.is_contiguous() and x.stride(1) == 1
    if one_by_one and 0 < len(x) <= FEW_ROWS and weights.fit_one_by_one:
        return _shrink_rows(x, weights, rows, norm, keeps_norm)
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    (num_rows, inputs), ranks = x.shape, weights.a.shape[1]
    chunks, room = -(-inputs // CHUNK), rows.blocks.shape[1]
    sums = x.new_empty(chunks, num_rows, ranks, dtype=torch.float32)
    if num_rows:
        shrink_kernel[(room, ranks // RANK_STEP, chunks)](
            *(x, x.stride(0), weights.a, sums, weights.ranks),
            *(rows.order, rows.blocks, rows.num_blocks, room, num_rows),
            IN=inputs,
            CHUNK=CHUNK,
            BLOCK_IN=BLOCK_IN,
            num_stages=4,
            **_options(weights, x.device),
            **programmatic_launch(x.device, 4),
        )
    return Shrunk(weights, rows, x, sums)


def _shrink_rows(
    x: torch.Tensor,
    weights: AdapterWeights,
    rows: ExpertRows,
    norm: NormWeight | None,
    keeps_norm: bool,
) -> Shrunk:
    """Each row by itself."""
    num_rows, inputs = x.shape
    ranks, block = weights.a.shape[1], triton.next_power_of_2(inputs)
    own_ranks = FEW_RANKS if num_rows <= MAX_FEW else RANKS
    sums = x.new_empty(1, num_rows, ranks, dtype=torch.float32)
    normed = None if norm is None or not keeps_norm else x.new_empty(num_rows, inputs)
    shrink_rows_kernel[(ranks // own_ranks, num_rows)](
        *(x, x.stride(0)),
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        *(normed, weights.a, weights.ranks, len(weights.ranks), rows.experts, sums),
        IN=inputs,
        BLOCK=block,
        PARTS=len(weights.sizes),
        STEP=weights.step,
        RANKS=own_ranks,
        RANK_STEP=RANK_STEP,
        **programmatic_launch(x.device, max(1, min(block // ELEMENTS_PER_WARP, 16))),
    )
    return Shrunk(weights, rows, x if normed is None else normed, sums)


def expand_triton(shrunk: Shrunk, total: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
    """See `expand`."""
    weights, rows, sums = shrunk.weights, shrunk.rows, shrunk.sums
    features = weights.b.shape[1]
    assert weights.b[0].is_contiguous() and total.stride(1) == 1
    assert total.shape == (sums.shape[1], features)
    output, size = total, 0
    num_blocks, room = len(weights.blocks), rows.blocks.shape[1]
    if gated:
        size = features // 2
        output = total.new_empty(len(total), size)
        num_blocks, room = -(-size // (BLOCK_OUT // 2)), room + 1
    if len(total):
        expand_kernel[(min(room * num_blocks, MAX_PROGRAMS),)](
            *(sums, weights.b, weights.b.stride(0), weights.blocks, num_blocks),
            *(total, total.stride(0), output, weights.ranks),
            *(rows.order, rows.blocks, rows.num_blocks, rows.blocks.shape[1], len(total)),
            CHUNKS=len(sums),
            GATED=size,
            BLOCK_OUT=BLOCK_OUT // 2 if gated else BLOCK_OUT,
            **_options(weights, total.device),
            **programmatic_launch(total.device, 4),
        )
    return output


def _options(weights: AdapterWeights, device: torch.device) -> dict[str, Any]:
    """Constants of both kernels with tiles."""
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
    x: tl.tensor, x_stride: tl.tensor, norm: tl.tensor, eps: tl.tensor, normed: tl.tensor,
    a: tl.tensor, ranks: tl.tensor, num_slots: tl.tensor, slots: tl.tensor, sums: tl.tensor,
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
        if normed is not None:
            kept = real & (rank == 0)
            tl.store(normed + row.to(tl.int64) * IN + columns, values, mask=kept)
    if has_rank:
        total = tl.sum(own.to(tl.float32) * values.to(tl.float32)[None, :], 1)
        tl.store(sums + row * (PARTS * STEP) + rank + tl.arange(0, RANKS), total)


@triton.jit(do_not_specialize=["room", "num_rows"])
def shrink_kernel(
    x: tl.tensor, x_stride: tl.tensor, a: tl.tensor, sums: tl.tensor, ranks: tl.tensor,
    order: tl.tensor, blocks: tl.tensor, num_blocks: tl.tensor, room: tl.tensor,
    num_rows: tl.tensor, IN: tl.constexpr, CHUNK: tl.constexpr, BLOCK_IN: tl.constexpr,
    PARTS: tl.constexpr, STEP: tl.constexpr, TILE_ROWS: tl.constexpr, RANK_STEP: tl.constexpr,
    SHARE_A: tl.constexpr, SHARE_B: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (blocks of rows, RANK_STEP ranks of a part, chunks of inputs)."""
    begin(PDL)
    block, rank, chunk = tl.program_id(0), tl.program_id(1) * RANK_STEP, tl.program_id(2)
    if block < tl.load(num_blocks):
        slot, end = tl.load(blocks + block), tl.load(blocks + 2 * room + block)
        places = tl.load(blocks + room + block) + tl.arange(0, TILE_ROWS)
        used = tl.load(ranks + slot // max(SHARE_A, SHARE_B) * PARTS + rank // STEP)
        if rank % STEP < used:
            real = places < end
            rows = tl.load(order + places, mask=real, other=0).to(tl.int64)
            columns = rank + tl.arange(0, RANK_STEP)
            a_rows = a + ((slot // SHARE_A).to(tl.int64) * PARTS * STEP + columns) * IN
            dot_type: tl.constexpr = tl.float32 if WIDEN else x.dtype.element_ty
            total = tl.zeros([TILE_ROWS, RANK_STEP], tl.float32)
            for start in tl.range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, IN), BLOCK_IN):
                k = start + tl.arange(0, BLOCK_IN)
                x_mask = real[:, None] & (k < IN)[None, :]
                values = tl.load(x + rows[:, None] * x_stride + k[None, :], mask=x_mask, other=0.0)
                weights = tl.load(a_rows[None, :] + k[:, None], mask=(k < IN)[:, None], other=0.0)
                total = tl.dot(
                    values.to(dot_type), weights.to(dot_type), total, input_precision="ieee"
                )
            targets = (chunk * num_rows + rows)[:, None] * (PARTS * STEP)
            tl.store(sums + targets + columns[None, :], total, mask=real[:, None])


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


@triton.jit(do_not_specialize=["room", "num_rows", "num_outputs"])
def expand_kernel(
    sums: tl.tensor, b: tl.tensor, b_stride: tl.tensor, outputs: tl.tensor, num_outputs: tl.tensor,
    total: tl.tensor, total_stride: tl.tensor, output: tl.tensor, ranks: tl.tensor,
    order: tl.tensor, blocks: tl.tensor, num_blocks: tl.tensor, room: tl.tensor,
    num_rows: tl.tensor, CHUNKS: tl.constexpr, GATED: tl.constexpr, BLOCK_OUT: tl.constexpr,
    PARTS: tl.constexpr, STEP: tl.constexpr, TILE_ROWS: tl.constexpr, RANK_STEP: tl.constexpr,
    SHARE_A: tl.constexpr, SHARE_B: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Programs share the blocks of rows times those of outputs. GATED: outputs of SwiGLU, or 0;
    with it rows without a slot, which are the last ones, follow in blocks of their own."""
    begin(PDL)
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
            outs = tl.load(outputs + own * 3 + 1) + columns
            inside = outs < tl.load(outputs + own * 3 + 2)
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
