"""The gated delta rule (arXiv 2412.06464) after a short causal convolution, over states by slot: a
Triton kernel if Triton is available, otherwise the plain-torch reference, which is the definition.

A slot keeps the state after its first tokens, and the inputs of the latest rows in a ring by
position. The rows of a window may be rejected, so they change no state: the next round reads the
accepted ones again from the ring (they are pending), keeps the state after them, and goes on. All
rows take the same steps in float32, so a state does not depend on drafts; one of 16 bits is rounded
after each of them."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch
from tllm_spec.kernels.slots.round_rows import RoundRows

NORM_EPS = 1e-6  # of q and k


@dataclass(frozen=True)
class DeltaShape:
    """The heads of a layer. Each key head serves as many neighbouring value heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    """Inputs of the convolution, K."""

    @property
    def num_channels(self) -> int:
        """C: q, k and v of all heads, which the convolution reads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def num_inputs(self) -> int:
        """I: elements of a row that change a state: b and a of each value head, then q, k and v."""
        return 2 * self.num_value_heads + self.num_channels

    @property
    def num_projected(self) -> int:
        """P: elements of a row: what changes the state, and a gate for each output."""
        return self.num_inputs + self.num_value_heads * self.value_dim


@dataclass(frozen=True)
class DeltaWeights:
    """A layer's weights: of the convolution `[C, K]`, and of the decay `[Hv]` float32 each."""

    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor


@dataclass(frozen=True)
class DeltaMemory:
    """A layer's memory of S slots."""

    states: torch.Tensor
    """`[S, Hv, Dk, Dv]`, of any floating-point type."""
    inputs: torch.Tensor
    """`[S, R, I]`: the inputs of the row at position p are at index p % R."""


@dataclass(frozen=True)
class DeltaBlocks:
    """N blocks of `size` rows of prompts: the first rows of their requests in a forward."""

    size: int
    starts: torch.Tensor
    """`[B + 1]` int32: request b has the blocks starts[b] to starts[b + 1]."""
    owners: torch.Tensor
    """`[N]` int32: the request of each block."""

    @cached_property
    def num_rows(self) -> torch.Tensor:
        """Rows of each request in blocks, `[B]` int32."""
        return self.starts.diff() * self.size


@dataclass(frozen=True)
class DeltaRows:
    """The rows of B requests in one forward, from position `first` on."""

    slots: torch.Tensor
    """`[B]` int64."""
    first: torch.Tensor
    """`[B]` int64."""
    pending: torch.Tensor
    """`[B]` int64: accepted rows before `first` that the state does not have yet. At position 0 a
    state is 0, whatever the memory has."""
    rows: RoundRows
    are_kept: bool
    """The rows are of prompts, and the state after them is kept. Otherwise they are windows."""
    tree: torch.Tensor | None = None
    """`[B, W]` int64: bit j of row r says that r is row j or comes after it. None: each row comes
    after the one before."""
    blocks: DeltaBlocks | None = None
    """Rows of prompts that `delta_blocks` runs."""


@dataclass(frozen=True)
class Carry:
    """What a row hands to the next one."""

    state: torch.Tensor  # [B, Hv, Dk, Dv] float32
    taps: torch.Tensor  # [B, K - 1, C]: the convolution's last inputs, oldest first

    def where(self, chosen: torch.Tensor, other: "Carry") -> "Carry":
        """This one where `chosen` `[B]`, otherwise the other one."""
        state = torch.where(chosen[:, None, None, None], self.state, other.state)
        return Carry(state, torch.where(chosen[:, None, None], self.taps, other.taps))


@with_kernel("states.gated_delta_triton.gated_delta_triton")
def gated_delta(
    projected: torch.Tensor,
    memory: DeltaMemory,
    shape: DeltaShape,
    weights: DeltaWeights,
    rows: DeltaRows,
    output: torch.Tensor,
) -> None:
    """Runs the rows that are in no block, and updates the memory.

    Args:
        projected: `[T, P]`, any stride between rows: b, a, q, k, v and gates (not read).
        memory: of the layer. R is at least the rows that are pending and those of a window, and
            K - 1.
        output: `[T, Hv, Dv]` float32, gets the state's answer to q after each row.
    """
    base = rows.first - rows.pending
    done = torch.zeros_like(base) if rows.blocks is None else rows.blocks.num_rows
    carry = start(memory, shape, rows.slots, base, done)
    for index in range(int(rows.pending.max())):
        inputs = memory.inputs[rows.slots, (base + index) % memory.inputs.shape[1]]
        after, _ = _advance(carry, inputs, shape, weights, memory.states.dtype)
        carry = after.where(index < rows.pending, carry)
    if not rows.are_kept:
        memory.states[rows.slots] = carry.state.to(memory.states.dtype)
    inputs = rows.rows.padded(projected[:, : shape.num_inputs])
    carries, width = [carry], inputs.shape[1]
    answers = output.new_zeros((len(inputs), width, *output.shape[1:]))
    for index in range(max(0, int(done.min()) + 1 - shape.kernel_size), width):
        before = carries[-1] if rows.tree is None else _parents(carries, rows.tree[:, index])
        own = inputs[:, index], shape, weights, memory.states.dtype
        after, answers[:, index] = _advance(before, *own)
        if rows.rows.offsets is not None:
            after = after.where(index < rows.rows.offsets.diff(), before)
        if rows.blocks is not None:  # rows in blocks are read by the convolution only
            after = Carry(after.where(index >= done, before).state, after.taps)
        carries = [*(carries if rows.tree is not None else ()), after]
    if rows.are_kept:
        memory.states[rows.slots] = carries[-1].state.to(memory.states.dtype)
    _keep_inputs(memory, rows, inputs, shape.kernel_size - 1 if rows.are_kept else width)
    is_new = torch.arange(width, device=output.device) >= done.unsqueeze(1)
    is_new = rows.rows.flat(is_new)
    output[is_new] = rows.rows.flat(answers)[is_new]


def start(
    memory: DeltaMemory,
    shape: DeltaShape,
    slots: torch.Tensor,
    base: torch.Tensor,
    done: torch.Tensor | int = 0,
) -> Carry:
    """What slots `[B]` have before the rows at positions base `[B]`; the states have `done` rows
    more."""
    state = memory.states.index_select(0, slots).float()
    state = state.masked_fill_((base + done == 0)[:, None, None, None], 0.0)
    positions = base.unsqueeze(1) + torch.arange(1 - shape.kernel_size, 0, device=base.device)
    taps = memory.inputs[slots.unsqueeze(1), positions % memory.inputs.shape[1]]
    taps = taps[..., 2 * shape.num_value_heads :].float()
    return Carry(state, taps.masked_fill_((positions < 0).unsqueeze(2), 0.0))


def _parents(carries: list[Carry], bits: torch.Tensor) -> Carry:
    """What each request's row comes after. bits `[B]`: of the rows; carries: before the windows,
    then after each row so far. A parent is the last of the rows that a row comes after."""
    number = torch.arange(len(carries), device=bits.device)
    sees = ((bits.unsqueeze(1) << 1) >> number) & 1
    parent = (sees * number).amax(1)
    requests = torch.arange(len(bits), device=bits.device)
    return Carry(
        torch.stack([each.state for each in carries])[parent, requests],
        torch.stack([each.taps for each in carries])[parent, requests],
    )


def _advance(
    carry: Carry, inputs: torch.Tensor, shape: DeltaShape, weights: DeltaWeights, dtype: torch.dtype
) -> tuple[Carry, torch.Tensor]:
    """One row of each request, inputs `[B, I]`: what it hands on, with a state of numbers of
    `dtype`, and its answer `[B, Hv, Dv]` before that rounding."""
    inputs = inputs.float()
    taps = torch.cat((carry.taps, inputs[:, 2 * shape.num_value_heads :].unsqueeze(1)), 1)
    mixed = F.silu((taps * weights.conv.float().t()).sum(1))
    q, k, v, step, strength = head_inputs(inputs, mixed, shape, weights)
    state = carry.state * step.exp()[:, :, None, None]
    delta = (v - (state * k.unsqueeze(3)).sum(2)) * strength.unsqueeze(2)
    state = state + k.unsqueeze(3) * delta.unsqueeze(2)
    answer = (state * q.unsqueeze(3)).sum(2)
    return Carry(state.to(dtype).float(), taps[:, 1:]), answer


def head_inputs(
    inputs: torch.Tensor, mixed: torch.Tensor, shape: DeltaShape, weights: DeltaWeights
) -> tuple[torch.Tensor, ...]:
    """What each value head gets of N rows: q and k `[N, Hv, Dk]`, v `[N, Hv, Dv]`, the logarithm of
    the state's decay, and how far a row changes the state, `[N, Hv]`. inputs `[N, I]` float32;
    mixed `[N, C]`: what the convolution makes of them."""
    num_heads, keys = shape.num_value_heads, shape.num_key_heads * shape.key_dim
    b, a = inputs[:, : 2 * num_heads].chunk(2, 1)
    q, k, v = mixed.split_with_sizes((keys, keys, num_heads * shape.value_dim), 1)
    q, k = (_normed(each.unflatten(1, (shape.num_key_heads, -1)), num_heads) for each in (q, k))
    v = v.unflatten(1, (num_heads, -1))
    step = -weights.a_log.exp() * F.softplus(a + weights.dt_bias)
    return q * shape.key_dim**-0.5, k, v, step, b.sigmoid()


def _normed(heads: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Key heads `[B, Hk, Dk]`, each divided by its length, for all value heads `[B, Hv, Dk]`."""
    normed = heads * (heads.square().sum(2, keepdim=True) + NORM_EPS).rsqrt()
    return normed.repeat_interleave(num_heads // heads.shape[1], 1)


def _keep_inputs(memory: DeltaMemory, rows: DeltaRows, inputs: torch.Tensor, most: int) -> None:
    """Writes the rows of inputs `[B, W, I]` that are read again: all of a window, and the last ones
    of a prompt."""
    index = torch.arange(inputs.shape[1], device=inputs.device)
    counts = torch.as_tensor(rows.rows.counts, device=inputs.device).expand(len(inputs))
    missing = counts.unsqueeze(1) - index
    places = (rows.first.unsqueeze(1) + index) % memory.inputs.shape[1]
    are_last = (missing > 0) & (missing <= most)
    slots = rows.slots.unsqueeze(1).expand_as(places)
    memory.inputs[slots[are_last], places[are_last]] = inputs[are_last]


# RMSNorm of each head, times the SiLU of a gate for each element: a Triton kernel if Triton is
# available, otherwise the plain-torch reference, which is the definition.


@with_kernel("gated_norm_triton")
def gated_norm(
    heads: torch.Tensor, gates: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Computed in float32 and rounded once, to the gates' type.

    Args:
        heads: `[T, H, D]` float32, contiguous.
        gates: `[T, H * D]`, any stride between rows.
        weight: `[D]`, of any type.
        eps: added to the mean square.

    Returns:
        `[T, H * D]`.
    """
    normed = heads * (heads.square().mean(2, keepdim=True) + eps).rsqrt() * weight.float()
    return (normed.flatten(1) * F.silu(gates.float())).to(gates.dtype)


def gated_norm_triton(
    heads: torch.Tensor, gates: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See `gated_norm`."""
    num_rows, num_heads, size = heads.shape
    assert heads.is_contiguous() and gates.stride(1) == 1 and weight.is_contiguous()
    output = gates.new_empty((num_rows, num_heads * size))
    gated_norm_kernel[(num_rows, num_heads)](
        heads,
        gates,
        gates.stride(0),
        weight,
        output,
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=1,
        **programmatic_launch(gates.device),
    )
    return output


@triton.jit
def gated_norm_kernel(
    heads: tl.tensor, gates: tl.tensor, gate_stride: tl.tensor, weight: tl.tensor,
    output: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (rows, heads)."""
    begin(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    real = columns < SIZE
    place = (row * tl.num_programs(1) + head) * SIZE + columns
    values = tl.load(heads + place, mask=real, other=0.0)
    gate = tl.load(gates + row * gate_stride + head * SIZE + columns, mask=real, other=0.0)
    gate = gate.to(tl.float32)
    weights = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    mean_square = tl.div_rn(tl.sum(values * values, 0), SIZE * 1.0)
    result = values * tl.rsqrt(mean_square + eps) * weights * gate * tl.sigmoid(gate)
    tl.store(output + place, result.to(output.dtype.element_ty), mask=real)
