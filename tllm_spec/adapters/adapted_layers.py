"""Linear layers with adapters (LoRA): the low-rank matrices of all slots in reserved tensors, added
to the layer's own output. Models do not know of them: an adapted weight is one more weight format,
which wraps the layer's own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tllm_spec.adapters.adapter_folder import LowRank
from tllm_spec.kernels.attention.latent_prefill import ExpandedPart
from tllm_spec.kernels.experts.grouped_gemm import swiglu
from tllm_spec.kernels.experts.permute import ExpertRows
from tllm_spec.kernels.gemm.adapter_gemm import (
    AdapterWeights,
    output_blocks,
    padded_rank,
    shrink,
    sorted_by_slot,
    with_adapters,
)
from tllm_spec.kernels.gemm.norms import silu_and_mul
from tllm_spec.kernels.gemm.small_m_gemm import takes
from tllm_spec.models.deepseek import LatentUp
from tllm_spec.models.draft_head import DraftHead
from tllm_spec.models.formats.stacked_weight import StackedWeight
from tllm_spec.models.formats.weight_format import (
    CudaWeight,
    FewRowsFormat,
    Part,
    Rows,
    WeightFormat,
)
from tllm_spec.models.layers import RMSNorm, WeightSlot
from tllm_spec.models.llama import CausalLM


class AdapterRows:
    """Which slot's adapter each row of a forward has. The engine fills in `slots` and calls `begin`
    before a forward."""

    def __init__(self, max_rows: int, num_slots: int, device: torch.device) -> None:
        self.slots = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        """`[max_rows]`, of a forward's rows in order; -1: none."""
        self.is_active = False
        """Whether layers launch the kernels of adapters. Read when a forward is launched or
        captured."""
        self._num_slots = num_slots
        self._sorted: dict[int, ExpertRows] = {}

    def begin(self, num_rows: int, wanted: torch.Tensor | None) -> None:
        """num_rows: of the forward. wanted: the rows that the model returns, in order, as
        `ForwardContext.wanted`; the others skip most of the last layer."""
        if self.is_active:
            own = self.slots[:num_rows]
            self._sorted = {num_rows: sorted_by_slot(own, self._num_slots)}
            if wanted is not None and 0 < len(wanted) < num_rows:
                part = sorted_by_slot(own.index_select(0, wanted), self._num_slots)
                self._sorted[len(wanted)] = part

    def of(self, num_rows: int) -> ExpertRows:
        """All rows, or those that the model returns, by slot; `experts` are the slots `[T, 1]`."""
        return self._sorted[num_rows]


# What a layer adds to its own output.


@dataclass(frozen=True)
class PairSlot:
    """Where the adapters of one module of the checkpoint go. The module has the `outputs` of the
    layer, which are its part `index`. expert: among those that take adapters."""

    layer: "AdaptedWeight"
    part: Part
    outputs: slice | None
    """None: other ranks have the module."""
    index: int = 0
    expert: int = 0

    def load(self, slot: int, pair: LowRank) -> None:
        """Copies this rank's part of the matrices into the slot."""
        weights, part, rank = self.layer.weights, self.part, len(pair.a)
        assert self.outputs is not None
        place, first = slot * len(self.layer.experts) + self.expert, self.index * weights.step
        by_inputs = part.shard_dim == 1
        a, b = weights.a[place, first : first + weights.step], weights.b[place, self.outputs]
        own = 1 if by_inputs else None, part.start
        WeightSlot(a[:rank], tuple(pair.a.shape), *own).load(pair.a)
        a[rank : padded_rank(rank)].zero_()
        own = None if by_inputs else part.shard_dim, part.start
        WeightSlot(b[:, :rank], tuple(pair.b.shape), *own, part.order).load(pair.b)


class AdaptedWeight(WeightFormat):
    """The weight `base`, to whose output the rows' adapters add. While no row has one, it does what
    the base does. shape: outputs and inputs of this rank's layer."""

    weights: AdapterWeights
    """Once the layer `is_reserved`: a module of it takes adapters."""
    is_reserved = False

    def __init__(self, base: WeightFormat, rows: AdapterRows, shape: tuple[int, int]) -> None:
        self._base, self.rows, self._shape = base, rows, shape
        self.weight, self.scales, self.bias = base.weight, base.scales, base.bias
        self.group = base.group
        self.experts = range(1)
        """Those of a rank's experts that take adapters; one for other layers."""
        self.places: dict[str, tuple[Rows | None, Part]] = {}
        """By module of the checkpoint, as `slot` gets them."""

    @property
    def base(self) -> WeightFormat:
        return self._base

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def acts(self) -> bool:
        return self.rows.is_active and self.is_reserved

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._base.parameters()

    def slot(self, module: str, rows: Rows | None, part: Part) -> WeightSlot:
        """The base's. It is noted where the module's adapters go."""
        self.places[module] = rows, part
        return self._base.slot(module, rows, part)

    def full_weight(self) -> torch.Tensor:
        return self._base.full_weight()

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        if not self.acts:
            return self._base.multiply(x)
        return self._with_adapters(x, lambda: self._base.multiply(x))

    def unrounded(self, x: torch.Tensor) -> torch.Tensor:
        if not self.acts:
            return self._base.unrounded(x)
        return self._with_adapters(x, lambda: self._base.unrounded(x))

    def forward(
        self, x: torch.Tensor, norm: RMSNorm | None = None, *, gated: bool = False
    ) -> torch.Tensor:
        """gated: SwiGLU follows what adapters add."""
        if not self.acts:
            return self._base.forward(x, norm)
        if self._fuses(x):
            return self._few_rows(x, norm)
        own = x if norm is None else norm.forward(x)
        inputs = (x, norm) if self._base.fuses_norm(x) else (own, None)
        return self._with_adapters(own, lambda: self._base.forward(*inputs), gated=gated)

    def gated(self, x: torch.Tensor, norm: RMSNorm | None = None, **gates: Any) -> torch.Tensor:
        if not self.acts:
            return self._base.gated(x, norm, **gates)
        if self._fuses(x):
            return self._few_rows(x, norm, gated="ups" not in gates, **gates)
        if gates:
            return silu_and_mul(self.forward(x, norm), **gates)
        return self.forward(x, norm, gated=True)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        def gemm() -> torch.Tensor:
            self._base.add_to(total, x)
            return total

        if not self.acts:
            gemm()
        elif self._fuses(x):
            self._few_rows(x, add_to=total)
        else:
            self._with_adapters(x, gemm)

    def _fuses(self, x: torch.Tensor) -> bool:
        """Whether the base's GEMM can expand."""
        base = self._base
        return isinstance(base, FewRowsFormat) and base.fuses_adapters(x) and takes(self.weights)

    def _few_rows(
        self, x: torch.Tensor, norm: RMSNorm | None = None, **options: Any
    ) -> torch.Tensor:
        """One launch more than without adapters."""
        assert isinstance(self._base, FewRowsFormat)
        own, kernel_norm = x, None
        if norm is not None and norm.scaled_weight is None:
            kernel_norm = norm.kernel_weight
        elif norm is not None:
            own = norm.forward(x)
        shrunk = shrink(own, self.weights, self.rows.of(len(x)), kernel_norm)
        return self._base.few_rows(x, norm, adapters=shrunk, **options)

    def _with_adapters(
        self, x: torch.Tensor, gemm: Callable[[], torch.Tensor], *, gated: bool = False
    ) -> torch.Tensor:
        return with_adapters(x, self.weights, self.rows.of(len(x)), gemm, gated=gated)

    def add_gated_to(
        self, total: torch.Tensor, gate_up: WeightFormat, x: torch.Tensor, norm: RMSNorm | None
    ) -> None:
        if self.rows.is_active:
            self.add_to(total, gate_up.gated(x, norm))
        else:
            self._base.add_gated_to(total, gate_up.base, x, norm)

    def ranks(self, slot: int) -> torch.Tensor:
        """`[E, P]` int32."""
        number = len(self.experts)
        return self.weights.ranks[slot * number : (slot + 1) * number]

    def reserve(
        self, takes: Callable[[str], bool], num_slots: int, step: int, model: CausalLM | DraftHead
    ) -> Iterator[tuple[str, PairSlot]]:
        """Makes the tensors of all slots, of ranks up to `step`, if the layer has a module that
        takes adapters. Yields such modules."""
        features, inputs = self._shape
        own = {name: split(rows, features) for name, (rows, _) in self.places.items() if rows}
        firsts = sorted({outputs.start for _, outputs in own.values()})
        experts = [expert for name, (expert, _) in own.items() if takes(name)]
        if experts:
            self.experts = range(min(experts), max(experts) + 1)
            sizes = tuple(end - first for first, end in pairwise((*firsts, features)))
            number = num_slots * len(self.experts)
            on: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
            self.is_reserved = True
            self.weights = AdapterWeights(
                torch.zeros(number, len(sizes) * step, inputs, **on),
                torch.zeros(number, features, step, **on),
                torch.zeros(number, len(sizes), dtype=torch.int32, device=model.device),
                output_blocks(sizes, model.device),
                sizes,
            )
        for name, (_, part) in self.places.items():
            if takes(name) and name not in own:
                yield name, PairSlot(self, part, None)
            elif takes(name):
                expert, outputs = own[name]
                index = firsts.index(outputs.start)
                yield name, PairSlot(self, part, outputs, index, expert - self.experts.start)


def split(rows: Rows, features: int) -> tuple[int, slice]:
    """The expert, 0 of layers without, and the outputs of a layer of `features`."""
    expert, outputs = rows if isinstance(rows, tuple) else (0, rows)
    return expert, slice(*outputs.indices(features)[:2])


class AdaptedStack(StackedWeight):
    """`AdaptedWeight` of one layer of all experts. Gates and ups are written before SwiGLU, which
    the base fuses."""

    form: AdaptedWeight

    def __init__(self, base: StackedWeight, rows: AdapterRows) -> None:
        vars(self).update(vars(base))
        self.base = base
        self.form = AdaptedWeight(base.form, rows, base.shape[1:])

    def gated(
        self,
        x: torch.Tensor,
        rows: ExpertRows,
        input_weights: torch.Tensor | None = None,
        **gates: Any,
    ) -> torch.Tensor:
        if not self.form.acts:
            return self.base.gated(x, rows, input_weights, **gates)
        order = rows.order.long()
        gate_up = self.base.multiply(x[order // rows.top_k], rows)
        self._add(gate_up, x.repeat_interleave(rows.top_k, 0), rows)
        if input_weights is not None:
            gate_up.mul_(input_weights.flatten().unsqueeze(1))
        return swiglu(gate_up, **gates).to(x.dtype)[order]

    def multiply(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        output = self.base.multiply(x, rows)
        if self.form.acts:
            self._add(output, torch.empty_like(x).index_copy_(0, rows.order.long(), x), rows)
        return output

    def _add(self, total: torch.Tensor, x: torch.Tensor, rows: ExpertRows) -> None:
        """For `[P, N]` and `[P, K]` in the order of the assignments."""
        number = len(self.form.experts)
        experts = rows.experts - (rows.first + self.form.experts.start)
        slots = self.form.rows.of(len(experts)).experts
        is_adapted = (experts >= 0) & (experts < number) & (slots >= 0)
        own = (slots * number + experts).where(is_adapted, -1)
        weights = self.form.weights
        by_slot = sorted_by_slot(own.flatten(), len(weights.a))
        with_adapters(x, weights, by_slot, lambda: total)


class LatentAdapters:
    """Adapters of MLA's `kv_b_proj`, whose weights attention reads: a context's keys and values add
    `B A c` of latents c, as other layers do. Windows have queries for latents, which add
    `A^T (B^T q)` of each head, and values of weighted latents."""

    copies: tuple[AdapterWeights, ...] = ()  # of queries and values, once they are reserved

    def __init__(self, up: LatentUp, nope_dim: int, rows: AdapterRows) -> None:
        heads, size, rank = up.heads.shape
        self.form = AdaptedWeight(CudaWeight(up.weight, None), rows, (heads * size, rank))
        self._shape = heads, nope_dim, size - nope_dim

    def reserve(self) -> Iterator[torch.Tensor]:
        """Called when the form has its tensors, of which queries need copies. Yields these."""
        if not self.form.is_reserved:
            return
        own, (heads, nope, width) = self.form.weights, self._shape
        number, step, rank = own.a.shape
        self._a = own.b.new_zeros(number * heads, step, nope)
        self._b = own.b.new_zeros(number, rank, step)
        blocks = output_blocks((rank,), own.b.device)
        self._queries = AdapterWeights(self._a, self._b, own.ranks, blocks, (rank,), share_b=heads)
        by_head = own.b.view(number * heads, nope + width, step)[:, nope:]
        blocks = output_blocks((width,), own.b.device)
        self._values = AdapterWeights(own.a, by_head, own.ranks, blocks, (width,), share_a=heads)
        self.copies = self._queries, self._values
        yield from (self._a, self._b)

    def loaded(self, slot: int) -> None:
        """Called when the form's tensors have another adapter in the slot."""
        if self.form.is_reserved:
            own, (heads, nope, _) = self.form.weights, self._shape
            by_head = own.b[slot].view(heads, -1, own.step)[:, :nope]
            self._a.view(-1, heads, own.step, nope)[slot] = by_head.mT
            self._b[slot] = own.a[slot].mT

    def expanded(self, latents: torch.Tensor, part: ExpandedPart, total: torch.Tensor) -> None:
        if self.form.acts:
            weights, slots = self.form.weights, self.form.rows.slots[part.owners]
            by_slot = sorted_by_slot(slots, len(weights.a))
            with_adapters(latents, weights, by_slot, lambda: total)

    def queries(self, q: torch.Tensor, rows: slice, total: torch.Tensor) -> None:
        if self.form.acts:
            self._add(q, self._queries, rows, total)

    def values(self, mixed: torch.Tensor, rows: slice, total: torch.Tensor) -> None:
        if self.form.acts:
            self._add(mixed, self._values, rows, total)

    def _add(
        self, x: torch.Tensor, weights: AdapterWeights, rows: slice, total: torch.Tensor
    ) -> None:
        """For `[T, H, *]`, head by head, so that neighbours have one adapter."""
        number, slots = x.shape[1], self.form.rows.slots[rows]
        heads = torch.arange(number, dtype=torch.int32, device=x.device).unsqueeze(1)
        own = (slots * number + heads).where(slots >= 0, -1).flatten()
        sums = total.transpose(0, 1).contiguous()
        by_slot = sorted_by_slot(own, len(weights.ranks) * number)
        own_x, own_sums = x.transpose(0, 1).flatten(0, 1), sums.flatten(0, 1)
        with_adapters(own_x, weights, by_slot, lambda: own_sums)
        if sums.data_ptr() != total.data_ptr():
            total.copy_(sums.transpose(0, 1))
