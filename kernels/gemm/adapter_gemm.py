"""Low-rank adapters of a linear layer (LoRA, arXiv 2106.09685): `y += B A x` with the matrices of
each row's adapter, which lie in slots. Two Triton kernels if Triton is available, otherwise the
plain-torch reference, which is the definition.

The first shrinks: all parts of a fused layer, whose inputs are cut into chunks of CHUNK, with
float32 sums. The second adds the chunks in order and expands. A tile of rows has one product for
each adapter in it, where the other adapters' rows are 0. So a row's bits do not depend on the other
rows, nor on how many rows a program has."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch

RANK_STEP = 16  # of a slot's rank; tensor cores multiply as many at a time
TILE_ROWS = 16
CHUNK, BLOCK_IN = 512, 128
BLOCK_OUT = 128
# Rows of a program by the most rows that a launch has with it. Few rows are spread, because rows of
# different adapters follow one another in a program.
OWN_ROWS = ((32, 1), (128, 4))


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


@with_kernel("add_adapters_triton")
def add_adapters(
    x: torch.Tensor, weights: AdapterWeights, slots: torch.Tensor, total: torch.Tensor
) -> None:
    """Add `B A x` to `total` in place. `A x` is summed in float32 and rounded to the type of x, the
    rest is rounded once.

    Args:
        x: `[T, K]`, any stride between rows.
        weights: of all slots.
        slots: `[T]` int32: the slot of each row; -1: none. Such rows keep their bits.
        total: `[T, N]`, any stride between rows.
    """
    step = weights.step
    for slot in set(slots.tolist()) - {-1}:
        rows = (slots == slot).nonzero().flatten()
        number = max(weights.share_a, weights.share_b)
        own, ranks, first = x[rows].float(), weights.ranks[slot // number].tolist(), 0
        for part, (rank, size) in enumerate(zip(ranks, weights.sizes, strict=True)):
            outputs, first = slice(first, first + size), first + size
            if rank:
                a = weights.a[slot // weights.share_a, part * step : part * step + rank].float()
                b = weights.b[slot // weights.share_b, outputs, :rank].float()
                delta = own.mm(a.t()).to(x.dtype).float().mm(b.t())
                total[rows, outputs] = (total[rows, outputs].float() + delta).to(total.dtype)


def add_adapters_triton(
    x: torch.Tensor, weights: AdapterWeights, slots: torch.Tensor, total: torch.Tensor
) -> None:
    """See `add_adapters`."""
    (num_rows, inputs), (_, features, step) = x.shape, weights.b.shape
    if not num_rows:
        return
    assert weights.a.is_contiguous() and weights.b[0].is_contiguous() and slots.is_contiguous()
    assert x.stride(1) == total.stride(1) == 1 and total.shape == (num_rows, features)
    parts, chunks = len(weights.sizes), -(-inputs // CHUNK)
    own = next((own for most, own in OWN_ROWS if num_rows <= most), TILE_ROWS)
    groups = -(-num_rows // own)
    sums = torch.empty((chunks, num_rows, parts * step), dtype=torch.float32, device=x.device)
    options = {
        "PARTS": parts,
        "STEP": step,
        "OWN": own,
        "TILE_ROWS": TILE_ROWS,
        "RANK_STEP": RANK_STEP,
        "SHARE_A": weights.share_a,
        "SHARE_B": weights.share_b,
        "WIDEN": x.device.type == "cpu",  # the interpreter cannot multiply bfloat16
        **programmatic_launch(x.device, 4),
    }
    shrink_kernel[(groups, parts * step // RANK_STEP, chunks)](
        *(x, x.stride(0), weights.a, weights.ranks, slots, sums, num_rows),
        IN=inputs,
        CHUNK=CHUNK,
        BLOCK_IN=BLOCK_IN,
        num_stages=4,
        **options,
    )
    expand_kernel[(groups, len(weights.blocks))](
        *(sums, weights.b, weights.b.stride(0), weights.ranks, slots, weights.blocks),
        *(total, total.stride(0), num_rows),
        CHUNKS=chunks,
        BLOCK_OUT=BLOCK_OUT,
        **options,
    )


@triton.jit
def _is_first(slot: tl.tensor, slots: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Whether there is a slot, which no row of the tile before the row `index` has."""
    rows = tl.arange(0, slots.shape[0])
    earlier = tl.sum(((slots == slot) & (rows < index)).to(tl.int32), 0)
    return (slot >= 0) & (earlier == 0)


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(
    x: tl.tensor, x_stride: tl.tensor, a: tl.tensor, ranks: tl.tensor, slots: tl.tensor,
    sums: tl.tensor, num_rows: tl.tensor, IN: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_IN: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, OWN: tl.constexpr,
    TILE_ROWS: tl.constexpr, RANK_STEP: tl.constexpr, SHARE_A: tl.constexpr,
    SHARE_B: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (groups of OWN rows, RANK_STEP ranks of a part, chunks of inputs)."""
    begin(PDL)
    first, chunk = tl.program_id(0) * OWN, tl.program_id(2)
    rank = tl.program_id(1) * RANK_STEP
    index = tl.arange(0, TILE_ROWS)
    rows, real = (first + index).to(tl.int64), (index < OWN) & (first + index < num_rows)
    own = tl.load(slots + rows, mask=real, other=-1)
    columns = rank + tl.arange(0, RANK_STEP)
    dot_type: tl.constexpr = tl.float32 if WIDEN else x.dtype.element_ty
    total = tl.zeros([TILE_ROWS, RANK_STEP], tl.float32)
    for row in range(OWN):
        slot = tl.load(slots + first + row, mask=first + row < num_rows, other=-1)
        if _is_first(slot, own, row):
            used = tl.load(ranks + slot // max(SHARE_A, SHARE_B) * PARTS + rank // STEP)
            if rank % STEP < used:
                a_rows = a + ((slot // SHARE_A).to(tl.int64) * PARTS * STEP + columns) * IN
                mine = (own == slot)[:, None]
                for start in tl.range(chunk * CHUNK, (chunk + 1) * CHUNK, BLOCK_IN):
                    k = start + tl.arange(0, BLOCK_IN)
                    inside = k < IN
                    values = tl.load(
                        x + rows[:, None] * x_stride + k[None, :],
                        mask=mine & inside[None, :], other=0.0,
                    )  # fmt: skip
                    weights = tl.load(a_rows[None, :] + k[:, None], mask=inside[:, None], other=0.0)
                    total = tl.dot(
                        values.to(dot_type), weights.to(dot_type), total, input_precision="ieee"
                    )
    targets = sums + (chunk * num_rows + rows)[:, None] * (PARTS * STEP) + columns[None, :]
    tl.store(targets, total, mask=(own >= 0)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def expand_kernel(
    sums: tl.tensor, b: tl.tensor, b_stride: tl.tensor, ranks: tl.tensor, slots: tl.tensor,
    blocks: tl.tensor, output: tl.tensor, output_stride: tl.tensor, num_rows: tl.tensor,
    CHUNKS: tl.constexpr, BLOCK_OUT: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr,
    OWN: tl.constexpr, TILE_ROWS: tl.constexpr, RANK_STEP: tl.constexpr, SHARE_A: tl.constexpr,
    SHARE_B: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (groups of OWN rows, blocks of outputs)."""
    begin(PDL)
    first, block = tl.program_id(0) * OWN, blocks + tl.program_id(1) * 3
    part, end = tl.load(block), tl.load(block + 2)
    outs = tl.load(block + 1) + tl.arange(0, BLOCK_OUT)
    index = tl.arange(0, TILE_ROWS)
    rows, real = (first + index).to(tl.int64), (index < OWN) & (first + index < num_rows)
    own = tl.load(slots + rows, mask=real, other=-1)
    number: tl.constexpr = max(SHARE_A, SHARE_B)
    used = tl.load(ranks + own // number * PARTS + part, mask=own >= 0, other=0)
    dot_type: tl.constexpr = tl.float32 if WIDEN else output.dtype.element_ty
    total = tl.zeros([TILE_ROWS, BLOCK_OUT], tl.float32)
    for row in range(OWN):
        slot = tl.load(slots + first + row, mask=first + row < num_rows, other=-1)
        if _is_first(slot, own, row):
            rank = tl.load(ranks + slot // number * PARTS + part)
            b_rows = b + (slot // SHARE_B).to(tl.int64) * b_stride + outs * STEP
            mine = (own == slot)[:, None]
            for start in tl.range(0, rank, RANK_STEP):
                r = start + tl.arange(0, RANK_STEP)
                sources = sums + rows[:, None] * (PARTS * STEP) + (part * STEP + r)[None, :]
                shrunk = tl.zeros([TILE_ROWS, RANK_STEP], tl.float32)
                for _ in tl.static_range(CHUNKS):
                    shrunk += tl.load(sources, mask=mine, other=0.0)
                    sources += num_rows.to(tl.int64) * (PARTS * STEP)
                shrunk = shrunk.to(output.dtype.element_ty).to(dot_type)
                inside = (outs < end)[None, :]
                weights = tl.load(b_rows[None, :] + r[:, None], mask=inside, other=0.0)
                total = tl.dot(shrunk, weights.to(dot_type), total, input_precision="ieee")
    targets = output + rows[:, None] * output_stride + outs[None, :]
    kept = (used > 0)[:, None] & (outs < end)[None, :]
    total += tl.load(targets, mask=kept, other=0.0).to(tl.float32)
    tl.store(targets, total.to(output.dtype.element_ty), mask=kept)
