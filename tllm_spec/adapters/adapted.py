"""Adapters of a target's linear layers (LoRA): for each layer, the low-rank matrices of all slots
in reserved tensors, added to the layer's own output. Models do not know of them: an adapted weight
is one more weight format, which wraps the layer's own."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tllm_spec.adapters.adapter_folder import Adapter, LowRank
from tllm_spec.kernels.attention.latent_prefill import ExpandedPart
from tllm_spec.kernels.experts.grouped_gemm import swiglu
from tllm_spec.kernels.experts.permute import ExpertRows
from tllm_spec.kernels.gemm.adapter_gemm import (
    CHUNK,
    AdapterWeights,
    add_adapters,
    output_blocks,
    padded_rank,
    sorted_by_slot,
)
from tllm_spec.kernels.gemm.norms import silu_and_mul
from tllm_spec.models.checkpoint import listed
from tllm_spec.models.deepseek import LatentUp
from tllm_spec.models.draft_head import DraftHead
from tllm_spec.models.formats.stacked_weight import StackedWeight
from tllm_spec.models.formats.weight_format import CudaWeight, Part, Rows, WeightFormat
from tllm_spec.models.gpt_oss import GptOssForCausalLM
from tllm_spec.models.layers import RMSNorm, WeightSlot
from tllm_spec.models.linear import Linear, OutputLinear
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.moe import Experts, Router
from tllm_spec.models.moe_config import MoEConfig
from tllm_spec.models.weights import weight_table

EXPERTS = "experts"  # among targets: the routed experts
# Why modules take no adapters, by the last part of their names.
UNSERVED = {
    "gate": "is the router, which is served without adapters",
    "router": "is the router, which is served without adapters",
    "lm_head": "is the output layer, which is served without adapters",
    "fc": "fuses the target's hidden states, which is served without adapters",
}


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
        assert weights is not None and self.outputs is not None
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

    def __init__(self, base: WeightFormat, rows: AdapterRows, shape: tuple[int, int]) -> None:
        self._base, self.rows, self._shape = base, rows, shape
        self.weight, self.scales, self.bias = base.weight, base.scales, base.bias
        self.group = base.group
        self.weights: AdapterWeights | None = None
        """None: the layer takes no adapters."""
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
        return self.rows.is_active and self.weights is not None

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._base.parameters()

    def slot(self, module: str, rows: Rows | None, part: Part) -> WeightSlot:
        """The base's. It is noted where the module's adapters go."""
        self.places[module] = rows, part
        return self._base.slot(module, rows, part)

    def full_weight(self) -> torch.Tensor:
        return self._base.full_weight()

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self._added(self._base.multiply(x), x)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        output = self._base.forward(x, norm)
        if not self.acts:
            return output
        return self._added(output, x if norm is None else norm.forward(x))

    def gated(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        return silu_and_mul(self.forward(x, norm)) if self.acts else self._base.gated(x, norm)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        self._base.add_to(total, x)
        self._added(total, x)

    def add_gated_to(
        self, total: torch.Tensor, gate_up: WeightFormat, x: torch.Tensor, norm: RMSNorm | None
    ) -> None:
        if self.rows.is_active:
            self.add_to(total, gate_up.gated(x, norm))
        else:
            self._base.add_gated_to(total, gate_up.base, x, norm)

    def _added(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.weights is not None and self.acts:
            add_adapters(x, self.weights, self.rows.of(len(x)), total)
        return total

    def ranks(self, slot: int) -> torch.Tensor:
        """`[E, P]` int32."""
        assert self.weights is not None
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
        assert self.form.weights is not None
        number = len(self.form.experts)
        experts = rows.experts - (rows.first + self.form.experts.start)
        slots = self.form.rows.of(len(experts)).experts
        is_adapted = (experts >= 0) & (experts < number) & (slots >= 0)
        own = (slots * number + experts).where(is_adapted, -1)
        weights = self.form.weights
        add_adapters(x, weights, sorted_by_slot(own.flatten(), len(weights.a)), total)


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
        if (own := self.form.weights) is None:
            return
        heads, nope, width = self._shape
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
        if (own := self.form.weights) is not None:
            heads, nope, _ = self._shape
            by_head = own.b[slot].view(heads, -1, own.step)[:, :nope]
            self._a.view(-1, heads, own.step, nope)[slot] = by_head.mT
            self._b[slot] = own.a[slot].mT

    def expanded(self, latents: torch.Tensor, part: ExpandedPart, total: torch.Tensor) -> None:
        if self.form.acts:
            assert self.form.weights is not None
            weights, slots = self.form.weights, self.form.rows.slots[part.owners]
            add_adapters(latents, weights, sorted_by_slot(slots, len(weights.a)), total)

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
        add_adapters(x.transpose(0, 1).flatten(0, 1), weights, by_slot, sums.flatten(0, 1))
        if sums.data_ptr() != total.data_ptr():
            total.copy_(sums.transpose(0, 1))


# The tables of a model.


class AdapterTables:
    """Installed into a model whose weights are loaded: wraps its linear layers, and reserves
    `num_slots` adapters of up to `max_rank` for the targets.

    targets: the last parts of module names, such as `q_proj`, or `experts`; None: all linear layers
    but routed experts."""

    def __init__(
        self,
        model: CausalLM | DraftHead,
        num_slots: int,
        max_rank: int,
        max_rows: int,
        targets: Collection[str] | None,
    ) -> None:
        self.rows = AdapterRows(max_rows, num_slots, model.device)
        self._model, self._targets = model, targets
        self._latents = list(self._of_latents())
        layers = [*self._wrapped(), *(each.form for each in self._latents)]
        weight_table(model)  # each layer notes its places
        for path, module in model.named_modules():
            if isinstance(module, LatentUp) and isinstance(module.adapters, LatentAdapters):
                [slot] = dict(module.slots(path)).values()
                (outputs, inputs), dim, start = slot.shape, slot.shard_dim, slot.start
                part = Part((outputs, inputs), dim, start)
                module.adapters.form.places[path] = slice(None), part
            if isinstance(module, Linear) and isinstance(
                form := module.weight_format, AdaptedWeight
            ):
                form.places = form.places or {path: (slice(None), Part(form.shape))}
        self._known = {name for layer in layers for name in layer.places}
        own = num_slots, padded_rank(max_rank), model
        self._pair_slots = dict(
            each for layer in layers for each in layer.reserve(self._takes, *own)
        )
        self._layers = [layer for layer in layers if layer.weights is not None]
        self._copies = [copy for each in self._latents for copy in each.reserve()]

    def _of_latents(self) -> Iterator[LatentAdapters]:
        for module in self._model.modules():
            if isinstance(module, LatentUp):
                mla = self._model.config.mla
                assert mla is not None
                adapters = module.adapters = LatentAdapters(module, mla.nope_dim, self.rows)
                yield adapters

    def _wrapped(self) -> Iterator[AdaptedWeight]:
        for module in self._model.modules():
            if isinstance(module, Experts):
                for name in ("gate_up_weights", "down_weights"):
                    stack = AdaptedStack(getattr(module, name), self.rows)
                    setattr(module, name, stack)
                    yield stack.form
            elif isinstance(module, Linear) and not isinstance(module, (OutputLinear, Router)):
                base = module.weight_format
                form = module.weight_format = AdaptedWeight(base, self.rows, base.shape)
                yield form

    def _takes(self, module: str) -> bool:
        if f".{EXPERTS}." in module:
            return self._targets is not None and EXPERTS in self._targets
        last = module.rpartition(".")[2]
        return last not in UNSERVED and (self._targets is None or last in self._targets)

    @property
    def num_bytes(self) -> int:
        """What is reserved."""
        weights = self.weights[: len(self._layers)]
        own = [t for each in weights for t in (each.a, each.b, each.ranks)]
        return sum(each.nbytes for each in (*own, *self._copies))

    @property
    def weights(self) -> list[AdapterWeights]:
        """All of them. Some share their tensors."""
        own = [layer.weights for layer in self._layers if layer.weights is not None]
        return own + [copy for each in self._latents for copy in each.copies]

    def sum_bytes(self, num_rows: int) -> int:
        """What the adapters of one layer allocate at most in a forward of so many rows."""
        moe, found = self._model.config.moe, [0]
        for layer in self._layers:
            assert layer.weights is not None
            _, ranks, inputs = layer.weights.a.shape
            rows = num_rows if moe is None or len(layer.experts) == 1 else num_rows * moe.top_k
            found.append(-(-inputs // CHUNK) * rows * ranks * torch.float32.itemsize)
        return max(found)

    def check(self, adapter: Adapter) -> None:
        """Raises ValueError, with all reasons, for an adapter that does not fit the model."""
        misfits = ((name, self._misfit(name, pair)) for name, pair in self._single(adapter))
        if reasons := [f"{name} {reason}" for name, reason in misfits if reason]:
            raise ValueError(
                f"the adapter does not fit {self._model.config.architecture}: {listed(reasons)}"
            )

    def _misfit(self, name: str, pair: LowRank) -> str:
        """Why a module's matrices do not fit; "" if they do."""
        last, found = name.rpartition(".")[2], (pair.b.shape[-2], pair.a.shape[-1])
        if pair.a.dim() == 3:
            moe = self._model.config.moe
            number = 0 if moe is None else moe.num_experts
            if len(pair.a) == number:
                return f"has {found[0]} outputs and inputs: which are which is not known"
            return f"has matrices of {len(pair.a)} experts, the model has {number}"
        if (pair_slot := self._pair_slots.get(name)) is not None:
            expected, most = pair_slot.part.shape, torch.finfo(self._model.dtype).max
            if found != expected:
                return f"is {found}, its layer {expected}"
            is_large = max(pair.a.abs().max(), pair.b.abs().max()) > most
            return f"has values beyond {most:g}, of the model's type" if is_large else ""
        if name not in self._known or last in UNSERVED:
            return UNSERVED.get(last, "is no linear layer of the model")
        own = f"{EXPERTS!r}, which are many" if f".{EXPERTS}." in name else repr(last)
        return f"is left out: lora_target_modules does not have {own}"

    def _single(self, adapter: Adapter) -> Iterator[tuple[str, LowRank]]:
        """The adapter's modules under the model's names, with matrices of single experts. Those of
        all experts that do not fit stay together."""
        part, moe = self._model.config.text_part, self._model.config.moe
        for module, pair in adapter.pairs.items():
            name = part.parameter_name(module)
            if moe is not None and name not in self._known:  # transformers' name of the layer
                name = name.replace(".mlp.", f".{moe.names.layer}.")
            if moe is None or pair.a.dim() == 2:
                yield name, pair
            else:
                yield from self._of_experts(name, pair, moe)

    def _of_experts(
        self, name: str, pair: LowRank, moe: MoEConfig
    ) -> Iterator[tuple[str, LowRank]]:
        """Releases of peft differ in which side of a parameter `[E, N, K]` has the inputs."""
        (module, _, kind), names = name.rpartition("."), moe.names
        is_mixed = isinstance(self._model, GptOssForCausalLM)
        shape = moe.hidden_size, moe.intermediate_size
        if kind == "gate_up_proj":
            shape = 2 * moe.intermediate_size, moe.hidden_size
        a, b, found = pair.a, pair.b, (pair.b.shape[1], pair.a.shape[2])
        has_inputs_first = is_mixed or names.inputs_first
        if len(a) != moe.num_experts or (found[0] == found[1] and not has_inputs_first):
            yield name, pair
            return
        if found == shape[::-1] and not has_inputs_first:
            a, b = b.mT, a.mT
        inner = moe.intermediate_size
        parts = {names.gate: slice(inner), names.up: slice(inner, None)}
        if kind == "down_proj":
            parts = {names.down: slice(None)}
        elif is_mixed:
            parts = {names.gate: slice(0, None, 2), names.up: slice(1, None, 2)}
        for expert in range(len(a)):
            for each, rows in parts.items():
                yield f"{module}.{expert}.{each}", LowRank(a[expert], b[expert][rows])

    def load(self, slot: int, adapter: Adapter) -> None:
        """Copies a checked adapter into the slot. Called while no forward uses the slot."""
        ranks = {}
        for layer in self._layers:
            assert layer.weights is not None
            ranks[layer] = torch.zeros(len(layer.experts), layer.weights.ranks.shape[1])
        for name, pair in self._single(adapter):
            pair_slot = self._pair_slots[name]
            if pair_slot.outputs is not None:
                pair_slot.load(slot, pair)
                ranks[pair_slot.layer][pair_slot.expert, pair_slot.index] = len(pair.a)
        for layer, own in ranks.items():
            layer.ranks(slot).copy_(own)
        for latents in self._latents:
            latents.loaded(slot)

    def clear(self, slot: int) -> None:
        """Rows with the slot are as those without."""
        for layer in self._layers:
            layer.ranks(slot).zero_()
