"""Low-rank adapters of a linear layer (LoRA, arXiv 2106.09685): `y += B A x` with the matrices of
each row's adapter, which lie in slots. Two Triton kernels if Triton is available, otherwise the
plain-torch reference, which is the definition.

Rows are sorted by slot, in blocks of one slot each. The first kernel shrinks: all parts of a fused
layer, whose inputs are cut into chunks of CHUNK, with float32 sums. The second adds the chunks in
order and expands. So a row's bits do not depend on the other rows, nor on how many there are."""

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
MAX_BLOCKS = 16  # of rows, before programs take several
RANKS, ELEMENTS_PER_WARP = 2, 512  # of a program that shrinks one row


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


@dataclass(frozen=True)
class Shrunk:
    """`A x` of a layer's few rows, which its GEMM expands (`small_m_gemm`)."""

    weights: AdapterWeights
    slots: torch.Tensor
    """`[T]` int32, contiguous: of each row, -1: it has none."""
    sums: torch.Tensor
    """`[T, P * R]` float32, rounded to the type of x; 0 after a part's rank, up to the next
    multiple of RANK_STEP, and undefined after that."""

    def added_to(self, output: torch.Tensor) -> torch.Tensor:
        """The reference of the GEMM's last step: `output + B A x`, rounded to its type."""
        output, step = output.clone(), self.weights.step
        for row, slot in enumerate(self.slots.tolist()):
            first = 0
            for part, size in enumerate(self.weights.sizes if slot >= 0 else ()):
                rank = int(self.weights.ranks[slot, part])
                own = self.sums[row, part * step : part * step + rank]
                delta = self.weights.b[slot, first : first + size, :rank].float().mv(own)
                output[row, first : first + size] += delta.to(output.dtype)
                first += size
        return output


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


@with_kernel("add_adapters_triton")
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
    step, number = weights.step, max(weights.share_a, weights.share_b)
    for slot, begins, ends in hit_experts(rows):
        mine = rows.order[begins:ends].long()
        own, ranks, first = x[mine].float(), weights.ranks[slot // number].tolist(), 0
        for part, (rank, size) in enumerate(zip(ranks, weights.sizes, strict=True)):
            outputs, first = slice(first, first + size), first + size
            if rank:
                a = weights.a[slot // weights.share_a, part * step : part * step + rank].float()
                b = weights.b[slot // weights.share_b, outputs, :rank].float()
                delta = own.mm(a.t()).to(x.dtype).float().mm(b.t())
                total[mine, outputs] = (total[mine, outputs].float() + delta).to(total.dtype)


@with_kernel("shrink_rows_triton")
def shrink_rows(
    x: torch.Tensor, weights: AdapterWeights, slots: torch.Tensor, norm: NormWeight | None
) -> Shrunk:
    """`A norm(x)` of each row, in float32, or of x without a norm.

    Args:
        x: `[T, K]`, any stride between rows.
        weights: of all slots, which share no matrix.
        slots: as `Shrunk` has them.
    """
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    sums = x.new_zeros(len(x), weights.a.shape[1], dtype=torch.float32)
    for row, slot in enumerate(slots.tolist()):
        for part, rank in enumerate(weights.ranks[slot].tolist() if slot >= 0 else ()):
            own = slice(part * weights.step, part * weights.step + rank)
            sums[row, own] = weights.a[slot, own].float().mv(x[row].float()).to(x.dtype).float()
    return Shrunk(weights, slots, sums)


def shrink_rows_triton(
    x: torch.Tensor, weights: AdapterWeights, slots: torch.Tensor, norm: NormWeight | None
) -> Shrunk:
    """See `shrink_rows`."""
    num_rows, inputs = x.shape
    assert weights.a.is_contiguous() and slots.is_contiguous() and x.stride(1) == 1
    ranks = weights.a.shape[1]
    shrunk = Shrunk(weights, slots, x.new_empty(num_rows, ranks, dtype=torch.float32))
    block = triton.next_power_of_2(inputs)
    shrink_rows_kernel[(ranks // RANKS, num_rows)](
        x,
        x.stride(0),
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        weights.a,
        weights.ranks,
        slots,
        shrunk.sums,
        IN=inputs,
        BLOCK=block,
        PARTS=len(weights.sizes),
        STEP=weights.step,
        RANKS=RANKS,
        RANK_STEP=RANK_STEP,
        **programmatic_launch(x.device, max(1, min(block // ELEMENTS_PER_WARP, 16))),
    )
    return shrunk


@triton.jit
def _own_rows(
    a: tl.tensor, ranks: tl.tensor, slot: tl.tensor, rank: tl.tensor, columns: tl.tensor,
    IN: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, RANKS: tl.constexpr,
    RANK_STEP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """RANKS rows of the slot's A, `[RANKS, BLOCK]`, and whether its adapter has them."""
    used = tl.load(ranks + tl.maximum(slot, 0) * PARTS + rank // STEP)
    used = tl.where(slot >= 0, tl.cdiv(used, RANK_STEP) * RANK_STEP, 0)
    has_rank = rank % STEP < used
    rows = (slot.to(tl.int64) * PARTS * STEP + rank + tl.arange(0, RANKS)) * IN
    kept = (columns < tl.where(has_rank, IN, 0))[None, :]
    return tl.load(a + rows[:, None] + columns[None, :], mask=kept, other=0.0), has_rank


@triton.jit
def shrink_rows_kernel(
    x: tl.tensor, x_stride: tl.tensor, norm: tl.tensor, eps: tl.tensor, a: tl.tensor,
    ranks: tl.tensor, slots: tl.tensor, sums: tl.tensor, IN: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, STEP: tl.constexpr, RANKS: tl.constexpr, RANK_STEP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (RANKS ranks of a part, rows). Matrices are read while the previous kernel runs, and
    again if only now the row has its slot."""
    launch_dependents(PDL)
    rank, row, columns = tl.program_id(0) * RANKS, tl.program_id(1), tl.arange(0, BLOCK)
    real, before = columns < IN, tl.load(slots + row)
    own, has_rank = _own_rows(a, ranks, before, rank, columns, IN, PARTS, STEP, RANKS, RANK_STEP)
    if norm is not None:
        factors = tl.load(norm + columns, mask=real, other=0.0)
    wait_for_previous(PDL)
    slot = tl.load(slots + row, volatile=True)
    if slot != before:
        own, has_rank = _own_rows(a, ranks, slot, rank, columns, IN, PARTS, STEP, RANKS, RANK_STEP)
    if has_rank:
        values = tl.load(x + row.to(tl.int64) * x_stride + columns, mask=real, other=0.0)
        if norm is not None:
            values = normed_row(values, factors, eps, IN).to(values.dtype)
        total = tl.sum(own.to(tl.float32) * values.to(tl.float32)[None, :], 1)
        targets = sums + row * (PARTS * STEP) + rank + tl.arange(0, RANKS)
        tl.store(targets, total.to(x.dtype.element_ty).to(tl.float32))


def add_adapters_triton(
    x: torch.Tensor, weights: AdapterWeights, rows: ExpertRows, total: torch.Tensor
) -> None:
    """See `add_adapters`."""
    assert total.shape == (len(x), weights.b.shape[1])
    if len(x):
        _expand(_shrink(x, weights, rows), weights, rows, total, None)


@with_kernel("gated_with_adapters_triton")
def gated_with_adapters(
    gate_up: torch.Tensor, x: torch.Tensor, weights: AdapterWeights, rows: ExpertRows
) -> torch.Tensor:
    """`silu_and_mul` of gate_up `[T, 2 * I]` after `add_adapters`, `[T, I]`. May change gate_up."""
    add_adapters.reference(x, weights, rows, gate_up)
    return silu_and_mul.reference(gate_up)


def gated_with_adapters_triton(
    gate_up: torch.Tensor, x: torch.Tensor, weights: AdapterWeights, rows: ExpertRows
) -> torch.Tensor:
    """See `gated_with_adapters`."""
    output = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    if len(x):
        _expand(_shrink(x, weights, rows), weights, rows, gate_up, output)
    return output


def _options(weights: AdapterWeights, device: torch.device) -> dict[str, Any]:
    """Of both kernels."""
    return {
        "PARTS": len(weights.sizes),
        "STEP": weights.step,
        "TILE_ROWS": TILE_ROWS,
        "RANK_STEP": RANK_STEP,
        "SHARE_A": weights.share_a,
        "SHARE_B": weights.share_b,
        "WIDEN": device.type == "cpu",  # the interpreter cannot multiply bfloat16
    }


def _shrink(x: torch.Tensor, weights: AdapterWeights, rows: ExpertRows) -> torch.Tensor:
    """`A x` of each chunk of the inputs, `[chunks, T, P * R]` float32."""
    assert weights.a.is_contiguous() and x.stride(1) == 1
    (num_rows, inputs), ranks = x.shape, weights.a.shape[1]
    chunks, room = -(-inputs // CHUNK), rows.blocks.shape[1]
    sums = x.new_empty(chunks, num_rows, ranks, dtype=torch.float32)
    shrink_kernel[(min(room, MAX_BLOCKS), ranks // RANK_STEP, chunks)](
        *(x, x.stride(0), weights.a, sums, weights.ranks),
        *(rows.order, rows.blocks, rows.num_blocks, room, num_rows),
        IN=inputs,
        CHUNK=CHUNK,
        BLOCK_IN=BLOCK_IN,
        num_stages=4,
        **_options(weights, x.device),
        **programmatic_launch(x.device, 4),
    )
    return sums


def _expand(
    sums: torch.Tensor,
    weights: AdapterWeights,
    rows: ExpertRows,
    total: torch.Tensor,
    gated: torch.Tensor | None,
) -> None:
    """Adds to `total`, or writes SwiGLU of the sum to `gated`."""
    assert weights.b[0].is_contiguous() and total.stride(1) == 1
    num_blocks, room = len(weights.blocks), rows.blocks.shape[1]
    block_out, size = BLOCK_OUT, 0
    if gated is not None:
        block_out, size = BLOCK_OUT // 2, gated.shape[1]
        num_blocks = -(-size // block_out)
    expand_kernel[(min(room, MAX_BLOCKS), num_blocks)](
        *(sums, weights.b, weights.b.stride(0), weights.blocks, total, total.stride(0)),
        *(gated, weights.ranks),
        *(rows.order, rows.blocks, rows.num_blocks, room, sums.shape[1]),
        CHUNKS=len(sums),
        GATED=size,
        BLOCK_OUT=block_out,
        **_options(weights, total.device),
        **programmatic_launch(total.device, 4),
    )


@triton.jit(do_not_specialize=["room", "num_rows"])
def shrink_kernel(
    x: tl.tensor, x_stride: tl.tensor, a: tl.tensor, sums: tl.tensor, ranks: tl.tensor,
    order: tl.tensor, blocks: tl.tensor, num_blocks: tl.tensor, room: tl.tensor,
    num_rows: tl.tensor, IN: tl.constexpr, CHUNK: tl.constexpr, BLOCK_IN: tl.constexpr,
    PARTS: tl.constexpr, STEP: tl.constexpr, TILE_ROWS: tl.constexpr, RANK_STEP: tl.constexpr,
    SHARE_A: tl.constexpr, SHARE_B: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (programs that share the blocks of rows, RANK_STEP ranks of a part, chunks)."""
    begin(PDL)
    rank, chunk = tl.program_id(1) * RANK_STEP, tl.program_id(2)
    for block in tl.range(tl.program_id(0), tl.load(num_blocks), tl.num_programs(0)):
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
    values: tl.tensor, sums: tl.tensor, b: tl.tensor, rank: tl.tensor, part: tl.tensor,
    rows: tl.tensor, outs: tl.tensor, real: tl.tensor, inside: tl.tensor, num_rows: tl.tensor,
    CHUNKS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, RANK_STEP: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The values and B A x of the rows and outputs, rounded. b: of the slot."""
    b_type: tl.constexpr = b.dtype.element_ty
    dot_type: tl.constexpr = tl.float32 if WIDEN else b_type
    added = tl.zeros(values.shape, tl.float32)
    for start in tl.range(0, rank, RANK_STEP):
        r = start + tl.arange(0, RANK_STEP)
        weights = tl.load(b + outs[None, :] * STEP + r[:, None], mask=inside[None, :], other=0.0)
        sources = rows[:, None] * WIDTH + (part * STEP + r)[None, :]
        shrunk = tl.zeros([rows.shape[0], RANK_STEP], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            offset = num_rows.to(tl.int64) * (chunk * WIDTH)
            shrunk += tl.load(sums + offset + sources, mask=real[:, None], other=0.0)
        shrunk = shrunk.to(b_type).to(dot_type)
        added = tl.dot(shrunk, weights.to(dot_type), added, input_precision="ieee")
    rounded = (values.to(tl.float32) + added).to(values.dtype)
    return tl.where(rank > 0, rounded, values)


@triton.jit(do_not_specialize=["room", "num_rows"])
def expand_kernel(
    sums: tl.tensor, b: tl.tensor, b_stride: tl.tensor, outputs: tl.tensor, total: tl.tensor,
    total_stride: tl.tensor, gated: tl.tensor, ranks: tl.tensor, order: tl.tensor,
    blocks: tl.tensor, num_blocks: tl.tensor, room: tl.tensor, num_rows: tl.tensor,
    CHUNKS: tl.constexpr, GATED: tl.constexpr, BLOCK_OUT: tl.constexpr, PARTS: tl.constexpr,
    STEP: tl.constexpr, TILE_ROWS: tl.constexpr, RANK_STEP: tl.constexpr, SHARE_A: tl.constexpr,
    SHARE_B: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (programs that share the blocks of rows, blocks of outputs). GATED: outputs of `gated`,
    or 0; rows without a slot, which are the last ones, follow in blocks of their own."""
    begin(PDL)
    number, columns = tl.load(num_blocks), tl.arange(0, BLOCK_OUT)
    if GATED > 0:
        part, last, outs = 0, GATED, tl.program_id(1) * BLOCK_OUT + columns
        none = tl.load(blocks + 2 * room + tl.maximum(number - 1, 0))
        none = tl.where(number > 0, none, 0)
        all_blocks = number + tl.cdiv(num_rows - none, TILE_ROWS)
    else:
        own, all_blocks, none = outputs + tl.program_id(1) * 3, number, number * 0
        part, outs, last = tl.load(own), tl.load(own + 1) + columns, tl.load(own + 2)
    inside = outs < last
    for block in tl.range(tl.program_id(0), all_blocks, tl.num_programs(0)):
        is_adapted, place = block < number, blocks + tl.minimum(block, room - 1)
        slot = tl.where(is_adapted, tl.load(place), 0)
        first = tl.where(is_adapted, tl.load(place + room), none + (block - number) * TILE_ROWS)
        end = tl.where(is_adapted, tl.load(place + 2 * room), num_rows)
        places = first + tl.arange(0, TILE_ROWS)
        real = places < end
        rows = tl.load(order + places, mask=real, other=0).to(tl.int64)
        targets = total + rows[:, None] * total_stride + outs[None, :]
        kept = real[:, None] & inside[None, :]
        own_ranks = ranks + slot // max(SHARE_A, SHARE_B) * PARTS
        rank = tl.where(is_adapted, tl.load(own_ranks + part), 0)
        b_slot = b + (slot // SHARE_B).to(tl.int64) * b_stride
        if GATED > 0:
            gate = tl.load(targets, mask=kept, other=0.0)
            up = tl.load(targets + GATED, mask=kept, other=0.0)
            gate = _expanded(
                gate, sums, b_slot, rank, 0, rows, outs, real, inside, num_rows, CHUNKS,
                PARTS * STEP, STEP, RANK_STEP, WIDEN,
            )  # fmt: skip
            rank = tl.where(is_adapted, tl.load(own_ranks + PARTS - 1), 0)
            up = _expanded(
                up, sums, b_slot + GATED * STEP, rank, PARTS - 1, rows, outs, real, inside,
                num_rows, CHUNKS, PARTS * STEP, STEP, RANK_STEP, WIDEN,
            )  # fmt: skip
            gate = gate.to(tl.float32)
            activated = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
            targets = gated + rows[:, None] * GATED + outs[None, :]
            tl.store(targets, activated.to(up.dtype), mask=kept)
        elif rank > 0:
            values = tl.load(targets, mask=kept, other=0.0)
            values = _expanded(
                values, sums, b_slot, rank, part, rows, outs, real, inside, num_rows, CHUNKS,
                PARTS * STEP, STEP, RANK_STEP, WIDEN,
            )  # fmt: skip
            tl.store(targets, values, mask=kept)
