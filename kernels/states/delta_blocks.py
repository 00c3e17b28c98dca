"""The gated delta rule for whole blocks of a prompt's rows: the chunk form of arXiv 2412.06464, a
few matrix products for each block instead of a step for each row. A Triton kernel if Triton is
available, otherwise the plain-torch reference.

With the state S before a block, its keys K and queries Q `[C, Dk]`, values V `[C, Dv]`, write
strengths b, and D[t, s] the decay from row s to row t (d[t]: from before the block), the changes U
that the rows make to the state solve a triangular system, from which answers and state follow:

    u[t] = b[t] (v[t] - d[t] S' k[t] - sum over s < t of D[t, s] (k[t] . k[s]) u[s])
    o[t] = d[t] S' q[t] + sum over s <= t of D[t, s] (q[t] . k[s]) u[s]
    S    = d[C-1] S + sum over s of D[C-1, s] k[s] u[s]'

All of it is in float32. It gives what the steps of `gated_delta` give, up to the order of sums; a
state of 16 bits is rounded after each block."""

import torch
import torch.nn.functional as F

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch
from tllm_spec.kernels.states.gated_delta import (
    NORM_EPS,
    DeltaMemory,
    DeltaRows,
    DeltaShape,
    DeltaWeights,
    head_inputs,
    start,
)
from tllm_spec.kernels.states.gated_delta_triton import rows_of

BLOCK_ROWS = 64  # of a block, where nothing limits it
LEAST_DIM = 16  # of the products in the kernel


@with_kernel("delta_blocks_triton")
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
            state = state.to(memory.states.dtype).float()
            answers.append(answer)
        memory.states[slots] = state.to(memory.states.dtype)
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


# Two kernels do what needs no state, for all blocks at once: the convolution; and of each value
# head the inverse of the triangular system and the weights of the answers. A program of the third
# one has some columns of the state of one head in registers, and goes through the blocks of a
# request. A block has at least 16 rows here; the rows that it really lacks change nothing.
# Products are of float32 if the model is, otherwise of TF32, whose 11 bits are more than a 16-bit
# model's inputs have; sums and states are float32.


_COLUMNS = 32  # of a state in one program
_EPS = tl.constexpr(NORM_EPS)


def delta_blocks_triton(
    projected: torch.Tensor,
    memory: DeltaMemory,
    shape: DeltaShape,
    weights: DeltaWeights,
    rows: DeltaRows,
    output: torch.Tensor,
) -> None:
    """See `delta_blocks`."""
    blocks, heads = rows.blocks, shape.num_value_heads
    assert blocks is not None and projected.stride(1) == 1
    number, size = len(blocks.owners), max(LEAST_DIM, triton.next_power_of_2(blocks.size))
    key_block, value_block = map(triton.next_power_of_2, (shape.key_dim, shape.value_dim))
    key_block = max(LEAST_DIM, key_block)
    keys = output.new_empty((number, 2 * shape.num_key_heads, size, key_block))
    systems = output.new_empty((number, heads, 2, size, size))
    passed = output.new_empty((number, heads, size))
    given = projected, projected.stride(0), rows.rows.window
    places = rows.rows.offsets, blocks.starts, blocks.owners
    sizes = {"KEY_HEADS": shape.num_key_heads, "HEADS": heads, "SIZE": blocks.size}
    sizes |= {"BLOCK_T": size, "BLOCK_K": key_block}
    dims = {"KEYS": shape.key_dim, "VALUES": shape.value_dim}
    precision = {"PRECISION": "ieee" if projected.dtype == torch.float32 else "tf32"}
    launch = programmatic_launch(projected.device)
    mix_blocks_kernel[(number, 2 * shape.num_key_heads + heads)](
        *given, memory.inputs, rows.slots, rows.first, *places, weights.conv, keys, output,
        RING=memory.inputs.shape[1], INPUTS=shape.num_inputs, KERNEL=shape.kernel_size,
        BLOCK=max(key_block, value_block), num_warps=8, **sizes, **dims, **launch,
    )  # fmt: skip
    solve_blocks_kernel[(number, heads)](
        *given, *places, weights.a_log, weights.dt_bias, keys, systems, passed,
        LEVELS=size.bit_length() - 1, num_warps=4, **sizes, **precision, **launch,
    )  # fmt: skip
    width = max(LEAST_DIM, min(_COLUMNS, value_block))
    advance_blocks_kernel[(rows.rows.num_requests, heads, triton.cdiv(shape.value_dim, width))](
        rows.rows.window, rows.slots, rows.first, *places[:2], output, memory.states, keys,
        systems, passed, BLOCK_V=width, num_warps=8, num_stages=1, **sizes, **dims, **precision,
        **launch,
    )  # fmt: skip


@triton.jit(do_not_specialize=["window"])
def mix_blocks_kernel(
    projected: tl.tensor, row_stride: tl.tensor, window: tl.tensor, rings: tl.tensor,
    slots: tl.tensor, firsts: tl.tensor, offsets: tl.tensor, starts: tl.tensor, owners: tl.tensor,
    conv: tl.tensor, keys: tl.tensor, output: tl.tensor, RING: tl.constexpr, INPUTS: tl.constexpr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    KERNEL: tl.constexpr, SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """What the convolution makes of q and k, of length 1 in `keys`, and of v, where the answers go.
    Grid (blocks, heads of q, then of k, then of v)."""
    begin(PDL)
    block, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = tl.load(owners + block)
    begins = (tl.program_id(0) - tl.load(starts + request)) * SIZE
    row, _ = rows_of(offsets, request, window)
    first, ring = tl.load(firsts + request), rings + tl.load(slots + request) * RING * INPUTS
    time, columns = begins + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK)
    head = part - 2 * KEY_HEADS
    real = columns < tl.where(head < 0, KEYS, VALUES)
    channels = tl.where(head < 0, part * KEYS, 2 * KEY_HEADS * KEYS + head * VALUES) + columns
    total = tl.zeros((BLOCK_T, BLOCK), tl.float32)
    exists = time < begins + SIZE
    for back in tl.static_range(KERNEL):
        taps = (time - back).to(tl.int64)
        places = tl.where(
            taps >= 0, projected + (row + taps) * row_stride, ring + (first + taps) % RING * INPUTS
        )
        mask = (exists & (first + taps >= 0))[:, None] & real[None, :]
        places = places[:, None] + (2 * HEADS + channels)[None, :]
        x = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(conv + channels * KERNEL + KERNEL - 1 - back, mask=real, other=0.0)
        total += x * weight.to(tl.float32)[None, :]
    mixed = total * tl.sigmoid(total)
    if head < 0:
        scale = tl.where(part < KEY_HEADS, tl.rsqrt(tl.full([], KEYS, tl.float32)), 1.0)
        mixed = mixed * (tl.rsqrt(tl.sum(mixed * mixed, 1) + _EPS) * scale)[:, None]
        to = keys + (block * 2 * KEY_HEADS + part) * BLOCK_T * BLOCK_K
        to += (time - begins)[:, None] * BLOCK_K
        tl.store(to + columns[None, :], mixed, mask=columns[None, :] < BLOCK_K)
    else:
        to = output + ((row + time[:, None]).to(tl.int64) * HEADS + head) * VALUES
        tl.store(to + columns[None, :], mixed, mask=exists[:, None] & real[None, :])


@triton.jit(do_not_specialize=["window"])
def solve_blocks_kernel(
    projected: tl.tensor, row_stride: tl.tensor, window: tl.tensor, offsets: tl.tensor,
    starts: tl.tensor, owners: tl.tensor, a_log: tl.tensor, dt_bias: tl.tensor, keys: tl.tensor,
    systems: tl.tensor, passed: tl.tensor, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The inverse of each block's system, the weights of its answers, and the logarithm of the
    decay up to each row. Grid (blocks, value heads)."""
    begin(PDL)
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = tl.load(owners + block)
    begins = (tl.program_id(0) - tl.load(starts + request)) * SIZE
    row, _ = rows_of(offsets, request, window)
    time, columns = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    exists = time < SIZE
    gates = projected + (row + begins + time) * tl.cast(row_stride, tl.int64) + head
    strength = tl.sigmoid(tl.load(gates, mask=exists, other=0.0).to(tl.float32))
    step = tl.load(gates + HEADS, mask=exists, other=0.0).to(tl.float32) + tl.load(dt_bias + head)
    # Beyond 20, log(1 + exp(x)) is x in float32.
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(step)))
    step = tl.where(exists, -tl.exp(tl.load(a_log + head)) * step, 0.0)
    total = tl.cumsum(step, 0)
    own = (block * HEADS + head) * BLOCK_T
    tl.store(passed + own + time, total)
    before, now = time[None, :] < time[:, None], time[None, :] <= time[:, None]
    decay = tl.exp(tl.where(now, total[:, None] - total[None, :], 0.0))
    of_q = keys + (block * 2 * KEY_HEADS + head // (HEADS // KEY_HEADS)) * BLOCK_T * BLOCK_K
    of_q += time[:, None] * BLOCK_K + columns[None, :]
    k = tl.trans(tl.load(of_q + KEY_HEADS * BLOCK_T * BLOCK_K))
    pairs = tl.dot(tl.load(of_q), k, input_precision=PRECISION)
    solved = systems + own * 2 * BLOCK_T + time[:, None] * BLOCK_T + time[None, :]
    tl.store(solved + BLOCK_T * BLOCK_T, tl.where(now, pairs * decay, 0.0))
    pairs = tl.dot(tl.trans(k), k, input_precision=PRECISION)
    system = tl.where(before, strength[:, None] * pairs * decay, 0.0)
    tl.store(solved, _inverse(system, time, LEVELS, PRECISION) * strength[None, :])


@triton.jit
def _inverse(
    system: tl.tensor, time: tl.tensor, LEVELS: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """(1 + system)^-1 of a matrix that has 0 on and above its diagonal, from the inverses of
    squares on the diagonal that double in each step: the part below two inverses A and B is -B C A,
    with the system's part C."""
    rows, columns = time[:, None], time[None, :]
    found = tl.where(rows == columns, 1.0, 0.0)
    for level in range(LEVELS):
        is_below = (rows >> level) == ((columns >> level) | 1)
        is_below = is_below & ((columns >> level) & 1 == 0)
        part = tl.where(is_below, system, 0.0)
        part = tl.dot(part, found, input_precision=PRECISION)
        found -= tl.dot(found, part, input_precision=PRECISION)
    return found


@triton.jit(do_not_specialize=["window"])
def advance_blocks_kernel(
    window: tl.tensor, slots: tl.tensor, firsts: tl.tensor, offsets: tl.tensor, starts: tl.tensor,
    output: tl.tensor, states: tl.tensor, keys: tl.tensor, systems: tl.tensor, passed: tl.tensor,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Reads v where the answers go. Grid (requests, value heads, blocks of a state's columns)."""
    begin(PDL)
    request, head = tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    time, inner, real = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K), columns < VALUES
    start = tl.load(starts + request)
    places = states + (tl.load(slots + request) * HEADS + head) * KEYS * VALUES
    places += inner[:, None] * VALUES + columns[None, :]
    begun = inner[:, None] < tl.where(tl.load(firsts + request) > 0, KEYS, 0)
    state = tl.load(places, mask=begun & real[None, :], other=0.0).to(tl.float32)
    row, _ = rows_of(offsets, request, window)
    answers = output + ((row + time[:, None]).to(tl.int64) * HEADS + head) * VALUES
    answers += columns[None, :]
    exist = (time[:, None] < SIZE) & real[None, :]
    for index in range(tl.load(starts + request + 1) - start):
        block = (start + index).to(tl.int64)
        own = (block * HEADS + head) * BLOCK_T
        of_q = keys + (block * 2 * KEY_HEADS + head // (HEADS // KEY_HEADS)) * BLOCK_T * BLOCK_K
        of_q += time[:, None] * BLOCK_K + inner[None, :]
        solved = systems + own * 2 * BLOCK_T + time[:, None] * BLOCK_T + time[None, :]
        total = tl.load(passed + own + time)
        end = tl.load(passed + own + BLOCK_T - 1)
        k = tl.load(of_q + KEY_HEADS * BLOCK_T * BLOCK_K)
        v = tl.load(answers, mask=exist, other=0.0)
        before = tl.exp(total)[:, None]
        change = v - before * tl.dot(k, state, input_precision=PRECISION)
        change = tl.dot(tl.load(solved), change, input_precision=PRECISION)
        answer = before * tl.dot(tl.load(of_q), state, input_precision=PRECISION)
        weights = tl.load(solved + BLOCK_T * BLOCK_T)
        answer = tl.dot(weights, change, answer, input_precision=PRECISION)
        tl.store(answers, answer, mask=exist)
        answers += SIZE * HEADS * VALUES
        change = tl.exp(end - total)[:, None] * change
        state = tl.dot(tl.trans(k), change, tl.exp(end) * state, input_precision=PRECISION)
        state = state.to(states.dtype.element_ty).to(tl.float32)
    tl.store(places, state, mask=(inner[:, None] < KEYS) & real[None, :])
