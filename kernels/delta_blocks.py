"""The gated delta rule for whole blocks of a prompt's rows: the chunk form of arXiv 2412.06464, a
few matrix products for each block instead of a step for each row. A Triton kernel if Triton is
available, otherwise the plain-torch reference.

With the state S before a block, its keys K and queries Q `[C, Dk]`, values V `[C, Dv]`, write
strengths b, and D[t, s] the decay from row s to row t (d[t]: from before the block), the changes U
that the rows make to the state solve a triangular system, from which answers and state follow:

    u[t] = b[t] (v[t] - d[t] S' k[t] - sum over s < t of D[t, s] (k[t] . k[s]) u[s])
    o[t] = d[t] S' q[t] + sum over s <= t of D[t, s] (q[t] . k[s]) u[s]
    S    = d[C-1] S + sum over s of D[C-1, s] k[s] u[s]'

All of it is in float32. It gives what the steps of `gated_delta` give, up to the order of sums."""

import torch
import torch.nn.functional as F

from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.gated_delta import (
    DeltaMemory,
    DeltaRows,
    DeltaShape,
    DeltaWeights,
    head_inputs,
    start,
)

BLOCK_ROWS = 64  # of a block, where nothing limits it
LEAST_DIM = 16  # of the products in the kernel


@with_kernel("delta_blocks_triton.delta_blocks_triton")
def delta_blocks(
    projected: torch.Tensor,
    memory: DeltaMemory,
    shape: DeltaShape,
    weights: DeltaWeights,
    rows: DeltaRows,
    output: torch.Tensor,
) -> None:
    """Runs `rows.blocks`, which are the first rows of requests without pending rows, and updates
    the states. `gated_delta`, which describes the arguments, runs the other rows afterwards."""
    blocks = rows.blocks
    assert blocks is not None
    counts, offsets = blocks.starts.diff().tolist(), rows.rows.offsets
    for request, number in enumerate(counts):
        if not number:
            continue
        begin = request * rows.rows.window if offsets is None else int(offsets[request])
        own = slice(begin, begin + number * blocks.size)
        slots, first = rows.slots[request : request + 1], rows.first[request : request + 1]
        carry = start(memory, shape, slots, first)
        inputs = projected[own, : shape.num_inputs].float()
        channels = inputs[:, 2 * shape.num_value_heads :]
        taps = torch.cat((carry.taps[0], channels)).unfold(0, shape.kernel_size, 1)
        mixed = F.silu((taps * weights.conv.float()).sum(2))
        parts = [
            part.reshape(number, blocks.size, *part.shape[1:]).transpose(1, 2)
            for part in head_inputs(inputs, mixed, shape, weights)
        ]
        state, answers = carry.state[0], []
        for block in zip(*parts, strict=True):
            state, answer = _block(state, *block)
            answers.append(answer)
        memory.states[slots] = state
        output[own] = torch.cat(answers, 1).transpose(0, 1)


def work_elements(shape: DeltaShape, size: int) -> int:
    """Float32 elements that the kernel needs for each row of blocks of that size."""
    rows = max(size, LEAST_DIM) * 2 * shape.num_value_heads + shape.num_value_heads
    keys = 2 * shape.num_key_heads * max(shape.key_dim, LEAST_DIM)
    return (rows + keys) * max(size, LEAST_DIM) // size


def _block(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: torch.Tensor,
    strength: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state `[Hv, Dk, Dv]` after a block, and its answers `[Hv, C, Dv]`. q, k `[Hv, C, Dk]`, v
    `[Hv, C, Dv]`; step, strength `[Hv, C]`: the logarithm of each row's decay, and b."""
    passed = step.cumsum(1)
    decay = (passed.unsqueeze(2) - passed.unsqueeze(1)).tril().exp().tril()
    before = passed.exp().unsqueeze(2)
    system = strength.unsqueeze(2) * (k @ k.mT * decay).tril(-1)
    values = strength.unsqueeze(2) * (v - before * (k @ state))
    change = torch.linalg.solve_triangular(system, values, upper=False, unitriangular=True)
    answer = before * (q @ state) + (q @ k.mT * decay) @ change
    state = before[:, -1:] * state + (k * decay[:, -1].unsqueeze(2)).mT @ change
    return state, answer
