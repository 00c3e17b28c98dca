"""The Triton kernels of gated_delta.py, which describes inputs and outputs. Importing this file
imports Triton.

A program has some columns of the state of one head in registers. It reads them, takes the pending
rows, writes them back, and goes on with the rows of the window, whose states are not written. So a
round moves each state twice, whatever the number of rows: 2 * 4 * Hv * Dk * Dv bytes of a request
and layer, 4 MiB with 32 heads of 128 * 128. The convolution of a row is repeated by the programs
that need it; its inputs come from the L2 cache.

Rows have indices relative to the request's first one: rows before it have negative ones, and are in
the ring. A row of a tree begins with the kept state and takes all rows of its path again.

No program reads an entry of the ring that another one writes: a window's rows go to entries that
hold rejected rows, or rows before those that the convolution reads. A prompt's last rows are
written after the prompt was read."""

import torch

from tllm_spec.kernels.dispatch import tl, triton
from tllm_spec.kernels.launch import begin, programmatic_launch
from tllm_spec.kernels.states.gated_delta import (
    NORM_EPS,
    DeltaMemory,
    DeltaRows,
    DeltaShape,
    DeltaWeights,
)

_COLUMNS, _WARPS = 32, 2  # columns of a state in one program, and its warps
_INPUTS = 1024  # of a row in one program
_EPS = tl.constexpr(NORM_EPS)


def gated_delta_triton(
    projected: torch.Tensor,
    memory: DeltaMemory,
    shape: DeltaShape,
    weights: DeltaWeights,
    rows: DeltaRows,
    output: torch.Tensor,
) -> None:
    """See `gated_delta`."""
    num_heads, width = shape.num_value_heads, shape.value_dim
    assert projected.stride(1) == 1 and memory.states.is_contiguous()
    assert memory.inputs.is_contiguous() and memory.inputs.dtype == projected.dtype
    assert output.is_contiguous()
    block = min(triton.next_power_of_2(width), _COLUMNS)
    number = rows.rows.num_requests
    common = projected, projected.stride(0), rows.rows.window, memory.inputs, rows.slots, rows.first
    sizes = {"RING": memory.inputs.shape[1], "INPUTS": shape.num_inputs}
    launch = programmatic_launch(projected.device)
    gated_delta_kernel[(number, num_heads, triton.cdiv(width, block))](
        *common,
        rows.pending,
        rows.rows.offsets,
        rows.tree,
        None if rows.blocks is None else rows.blocks.num_rows,
        memory.states,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        output,
        **sizes,
        KEY_HEADS=shape.num_key_heads,
        HEADS=num_heads,
        KEYS=shape.key_dim,
        VALUES=width,
        KERNEL=shape.kernel_size,
        BLOCK_T=triton.next_power_of_2(shape.kernel_size),
        BLOCK_K=triton.next_power_of_2(shape.key_dim),
        BLOCK_V=block,
        ARE_KEPT=rows.are_kept,
        num_warps=_WARPS,
        **launch,
    )
    if rows.are_kept:
        taps, columns = shape.kernel_size - 1, triton.cdiv(shape.num_inputs, _INPUTS)
        keep_inputs_kernel[(number, taps, columns)](
            *common, rows.rows.offsets, **sizes, BLOCK=_INPUTS, num_warps=4, **launch
        )


@triton.jit(do_not_specialize=["window"])
def gated_delta_kernel(
    projected: tl.tensor, row_stride: tl.tensor, window: tl.tensor, rings: tl.tensor,
    slots: tl.tensor, firsts: tl.tensor, pendings: tl.tensor, offsets: tl.tensor, tree: tl.tensor,
    skipped: tl.tensor, states: tl.tensor, conv: tl.tensor, a_log: tl.tensor, dt_bias: tl.tensor,
    output: tl.tensor, RING: tl.constexpr, INPUTS: tl.constexpr, KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, KERNEL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ARE_KEPT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (requests, value heads, blocks of a state's columns)."""
    begin(PDL)
    request, head, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slot, first = tl.load(slots + request), tl.load(firsts + request)
    start, count = rows_of(offsets, request, window)
    row_stride = tl.cast(row_stride, tl.int64)
    where = (projected + start * row_stride, row_stride, rings + slot * RING * INPUTS, first)
    keys, values = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    columns = _columns(head, keys, values, KEY_HEADS, HEADS, KEYS, VALUES)
    layer = _layer(conv, a_log, dt_bias, columns, head, HEADS, KEYS, KERNEL, BLOCK_T)
    places = states + (slot * HEADS + head) * KEYS * VALUES + keys[:, None] * VALUES
    places = places + values[None, :]
    tile = (keys[:, None] < KEYS) & (values[None, :] < VALUES)
    pending = tl.load(pendings + request).to(tl.int32)
    done = 0 if skipped is None else tl.load(skipped + request)
    begun = keys < tl.where(first + done > pending, KEYS, 0)
    state = tl.load(places, mask=tile & begun[:, None], other=0.0).to(tl.float32)
    for index in range(-pending, 0):
        state, _ = _advance(
            state, index, where, None, columns, layer, RING, INPUTS, HEADS, KERNEL, BLOCK_T,
            states.dtype.element_ty,
        )  # fmt: skip
    if not ARE_KEPT:
        tl.store(places, state, mask=tile)
    bits = None if tree is None else tree + request * window
    answers = output + (start * HEADS + head) * VALUES + values
    state = _run(
        state, done, count, where, bits, columns, layer, answers, block, RING, INPUTS, KEY_HEADS,
        HEADS, VALUES, KERNEL, BLOCK_T, ARE_KEPT, states.dtype.element_ty,
    )  # fmt: skip
    if ARE_KEPT:
        tl.store(places, state, mask=tile)


@triton.jit
def _run(
    state: tl.tensor, done: tl.tensor, count: tl.tensor, where: tl.tensor, bits: tl.tensor,
    columns: tl.tensor, layer: tl.tensor, answers: tl.tensor, block: tl.tensor, RING: tl.constexpr,
    INPUTS: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, VALUES: tl.constexpr,
    KERNEL: tl.constexpr, BLOCK_T: tl.constexpr, ARE_KEPT: tl.constexpr, STATE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Runs the request's rows from `done` on. answers `[V]`: where those of the first row go.
    Returns the state after the last one."""
    own, row_stride, ring, first = where
    kept, are_values = state, columns[2] >= 0
    for row in range(done, count):
        begins = row
        if bits is not None:
            state = kept
            begins = 0
        answer = tl.zeros(columns[2].shape, tl.float32)
        for index in range(begins, row + 1):
            if _is_before(bits, row, index):
                state, answer = _advance(
                    state, index, where, bits, columns, layer, RING, INPUTS, HEADS, KERNEL, BLOCK_T,
                    STATE,
                )  # fmt: skip
        tl.store(answers + row * HEADS * VALUES, answer, mask=are_values)
        if not ARE_KEPT:
            place = ring + (first + row) % RING * INPUTS
            source = own + row * row_stride
            _keep_row(source, place, layer[5], block, columns, KEY_HEADS, HEADS)
    return state


@triton.jit(do_not_specialize=["window"])
def keep_inputs_kernel(
    projected: tl.tensor, row_stride: tl.tensor, window: tl.tensor, rings: tl.tensor,
    slots: tl.tensor, firsts: tl.tensor, offsets: tl.tensor, RING: tl.constexpr,
    INPUTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Writes the last rows of each prompt to the rings. Grid (requests, rows, blocks of inputs)."""
    begin(PDL)
    request = tl.program_id(0).to(tl.int64)
    start, count = rows_of(offsets, request, window)
    row = count - 1 - tl.program_id(1)
    if row >= 0:
        slot, first = tl.load(slots + request), tl.load(firsts + request)
        columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        real = columns < INPUTS
        values = tl.load(projected + (start + row) * row_stride + columns, mask=real)
        place = rings + (slot * RING + (first + row) % RING) * INPUTS
        tl.store(place + columns, values, mask=real)


@triton.jit
def rows_of(
    offsets: tl.tensor, request: tl.tensor, window: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The first row of a request, and how many it has."""
    if offsets is None:
        return request * window, window
    else:  # noqa: RET505 - Triton compiles what follows a return
        start = tl.load(offsets + request).to(tl.int64)
        return start, tl.load(offsets + request + 1) - start.to(tl.int32)


@triton.jit
def _is_before(bits: tl.tensor, row: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Whether the row is the one at `index`, or comes after it. bits: of the request's tree."""
    if bits is None:
        return row == index
    else:  # noqa: RET505 - Triton compiles what follows a return
        return ((tl.load(bits + row) >> index) & 1) != 0


@triton.jit
def _taps(
    bits: tl.tensor, index: tl.tensor, KERNEL: tl.constexpr, BLOCK_T: tl.constexpr
) -> tl.tensor:
    """The indices of the rows that the convolution of the row at `index` reads, `[T]` int64: that
    row and those before it, of a tree on its path."""
    backs = tl.arange(0, BLOCK_T)
    taps = (index - backs).to(tl.int64)
    if bits is not None:
        tap = index
        for back in tl.static_range(1, KERNEL):
            before = tap - 1
            if tap >= 0:
                number = tl.arange(0, 64)
                path = (tl.load(bits + tap) >> number) & 1
                before = tl.max(tl.where((path != 0) & (number < tap), number, -1), 0)
            tap = before
            taps = tl.where(backs == back, tap, taps)
    return taps


@triton.jit
def _columns(
    head: tl.tensor, keys: tl.tensor, values: tl.tensor, KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Where a row's inputs have q `[K]`, k `[K]` and v `[V]` of a value head; -1: nowhere."""
    q = 2 * HEADS + head // (HEADS // KEY_HEADS) * KEYS + keys
    v = 2 * HEADS + 2 * KEY_HEADS * KEYS + head * VALUES + values
    are_keys = keys < KEYS
    k = tl.where(are_keys, q + KEY_HEADS * KEYS, -1)
    return tl.where(are_keys, q, -1), k, tl.where(values < VALUES, v, -1)


@triton.jit
def _layer(
    conv: tl.tensor, a_log: tl.tensor, dt_bias: tl.tensor, columns: tl.tensor, head: tl.tensor,
    HEADS: tl.constexpr, KEYS: tl.constexpr, KERNEL: tl.constexpr, BLOCK_T: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """What all rows share: weights of the columns, of the decay, the head, and q's factor."""
    q_weights = _weights(conv, columns[0], HEADS, KERNEL, BLOCK_T)
    k_weights = _weights(conv, columns[1], HEADS, KERNEL, BLOCK_T)
    v_weights = _weights(conv, columns[2], HEADS, KERNEL, BLOCK_T)
    a, bias = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    scale = tl.rsqrt(tl.full([], KEYS, tl.float32))
    return q_weights, k_weights, v_weights, a, bias, head, scale


@triton.jit
def _weights(
    conv: tl.tensor,
    columns: tl.tensor,
    HEADS: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> tl.tensor:
    """The convolution's weights of some columns `[N]`, `[T, N]`, of the latest input first."""
    backs = tl.arange(0, BLOCK_T)
    places = conv + (columns - 2 * HEADS)[None, :] * KERNEL + (KERNEL - 1 - backs)[:, None]
    real = (backs < KERNEL)[:, None] & (columns >= 0)[None, :]
    return tl.load(places, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _mixed(places: tl.tensor, columns: tl.tensor, real: tl.tensor, weights: tl.tensor) -> tl.tensor:
    """What the convolution makes of the inputs at places `[T]` in some columns `[N]`."""
    exist = real[:, None] & (columns >= 0)[None, :]
    x = tl.load(places[:, None] + columns[None, :], mask=exist, other=0.0).to(tl.float32)
    total = tl.sum(x * weights, 0)
    return total * tl.sigmoid(total)


@triton.jit
def _advance(
    state: tl.tensor, index: tl.tensor, where: tl.tensor, bits: tl.tensor, columns: tl.tensor,
    layer: tl.tensor, RING: tl.constexpr, INPUTS: tl.constexpr, HEADS: tl.constexpr,
    KERNEL: tl.constexpr, BLOCK_T: tl.constexpr, STATE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The state `[K, V]` after the row at `index`, rounded to the type STATE, and the row's answer
    `[V]`."""
    own, row_stride, ring, first = where
    q_weights, k_weights, v_weights, a, bias, head, scale = layer
    taps = _taps(bits, index, KERNEL, BLOCK_T)
    places = tl.where(taps >= 0, own + taps * row_stride, ring + (first + taps) % RING * INPUTS)
    real = (tl.arange(0, BLOCK_T) < KERNEL) & (first + taps >= 0)
    q = _mixed(places, columns[0], real, q_weights)
    k = _mixed(places, columns[1], real, k_weights)
    v = _mixed(places, columns[2], real, v_weights)
    gates = own + index * row_stride
    if index < 0:
        gates = ring + (first + index) % RING * INPUTS
    beta = tl.sigmoid(tl.load(gates + head).to(tl.float32))
    step = tl.load(gates + HEADS + head).to(tl.float32) + bias
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + _EPS) * scale)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + _EPS)
    # Beyond 20, log(1 + exp(x)) is x in float32.
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(step)))
    state = state * tl.exp(-a * step)
    delta = (v - tl.sum(state * k[:, None], 0)) * beta
    state = state + k[:, None] * delta[None, :]
    return state.to(STATE).to(tl.float32), tl.sum(state * q[:, None], 0)


@triton.jit
def _keep_row(
    source: tl.tensor, place: tl.tensor, head: tl.tensor, block: tl.tensor, columns: tl.tensor,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Copies a program's part of a row's inputs: what no other program copies."""
    q, k, v = columns
    tl.store(place + v, tl.load(source + v, mask=v >= 0), mask=v >= 0)
    if block == 0:
        tl.store(place + head, tl.load(source + head))
        tl.store(place + HEADS + head, tl.load(source + HEADS + head))
        if head % (HEADS // KEY_HEADS) == 0:
            tl.store(place + q, tl.load(source + q, mask=q >= 0), mask=q >= 0)
            tl.store(place + k, tl.load(source + k, mask=k >= 0), mask=k >= 0)
