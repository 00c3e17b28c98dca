"""The adapters of a target (LoRA): which of its linear layers take them, and the tensors of all
slots that they fill."""

from collections import Counter
from collections.abc import Collection, Iterator

import torch

from tllm_spec.adapters.adapted_layers import (
    AdaptedStack,
    AdaptedWeight,
    AdapterRows,
    LatentAdapters,
)
from tllm_spec.adapters.adapter_folder import Adapter, LowRank
from tllm_spec.kernels.gemm.adapter_gemm import AdapterWeights, padded_rank
from tllm_spec.models.checkpoint import listed
from tllm_spec.models.deepseek import LatentUp
from tllm_spec.models.draft_head import DraftHead
from tllm_spec.models.formats.weight_format import Part
from tllm_spec.models.gpt_oss import GptOssForCausalLM
from tllm_spec.models.linear import Linear, OutputLinear
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.moe import Experts
from tllm_spec.models.moe_config import MoEConfig
from tllm_spec.models.weights import weight_table

EXPERTS = "experts"  # among targets: the routed experts
# What takes adapters only if targets name it, and what it is: most adapters have none for it, and
# it would take memory or time.
IF_NAMED = {EXPERTS: "which are many"} | dict.fromkeys(("gate", "router", "proj"), "the router")
# Why modules take no adapters, by the last part of their names.
UNSERVED = {
    "lm_head": "is the output layer, which is served without adapters",
    "fc": "fuses the target's hidden states, which is served without adapters",
}


def kind_of(module: str) -> str:
    """What `lora_target_modules` calls it."""
    return EXPERTS if f".{EXPERTS}." in module else module.rpartition(".")[2]


class AdapterTables:
    """Installed into a model whose weights are loaded: wraps its linear layers, and reserves
    `num_slots` adapters of up to `max_rank` for the targets.

    targets: the last parts of module names, such as `q_proj`, or `experts`; None: all linear layers
    but those of IF_NAMED."""

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
            if isinstance(module, Linear) and isinstance(
                form := module.weight_format, AdaptedWeight
            ):
                form.places = form.places or {path: (slice(None), Part(form.shape))}
        self._known = {name for layer in layers for name in layer.places}
        own = num_slots, padded_rank(max_rank), model
        self._pair_slots = dict(
            each for layer in layers for each in layer.reserve(self._takes, *own)
        )
        self._layers = [layer for layer in layers if layer.is_reserved]
        self._copies = [copy for each in self._latents for copy in each.reserve()]

    def _of_latents(self) -> Iterator[LatentAdapters]:
        for path, module in self._model.named_modules():
            if isinstance(module, LatentUp):
                mla = self._model.config.mla
                assert mla is not None
                adapters = module.adapters = LatentAdapters(module, mla.nope_dim, self.rows)
                [slot] = dict(module.slots(path)).values()
                (outputs, inputs), dim, start = slot.shape, slot.shard_dim, slot.start
                adapters.form.places[path] = slice(None), Part((outputs, inputs), dim, start)
                yield adapters

    def _wrapped(self) -> Iterator[AdaptedWeight]:
        for module in self._model.modules():
            if isinstance(module, Experts):
                for name in ("gate_up_weights", "down_weights"):
                    stack = AdaptedStack(getattr(module, name), self.rows)
                    setattr(module, name, stack)
                    yield stack.form
            elif isinstance(module, Linear) and not isinstance(module, OutputLinear):
                base = module.weight_format
                form = module.weight_format = AdaptedWeight(base, self.rows, base.shape)
                yield form

    def _takes(self, module: str) -> bool:
        kind = kind_of(module)
        is_target = kind not in IF_NAMED if self._targets is None else kind in self._targets
        return is_target and kind not in UNSERVED

    def check_targets(self) -> None:
        """Raises ValueError for targets that the model does not have."""
        if lacking := {*(self._targets or ())} - {kind_of(name) for name in self._pair_slots}:
            raise ValueError(
                f"lora_config.lora_target_modules: {self._model.config.architecture} has no layers "
                f"for adapters that are named {listed(sorted(map(repr, lacking)))}"
            )

    @property
    def num_bytes(self) -> int:
        """What is reserved."""
        layers = [layer.weights for layer in self._layers]
        own = [t for each in layers for t in (each.a, each.b, each.ranks)]
        return sum(each.nbytes for each in (*own, *self._copies))

    @property
    def weights(self) -> list[AdapterWeights]:
        """All of them. Some share their tensors."""
        copies = [copy for each in self._latents for copy in each.copies]
        return [*(layer.weights for layer in self._layers), *copies]

    def sum_bytes(self, num_rows: int) -> int:
        """What the adapters of one layer allocate at most in a forward of so many rows."""
        moe, found = self._model.config.moe, [0]
        for layer in self._layers:
            weights = layer.weights
            rows = num_rows if moe is None or len(layer.experts) == 1 else num_rows * moe.top_k
            ranks = weights.a.shape[1]
            found.append(weights.num_chunks * rows * ranks * torch.float32.itemsize)
        return max(found)

    def check(self, adapter: Adapter) -> None:
        """Raises ValueError, with all reasons, for an adapter that does not fit the model."""
        pairs = list(self._single(adapter))
        misfits = [(name, self._misfit(name, pair)) for name, pair in pairs]
        numbers = Counter(name for name, _ in pairs)
        misfits += [(name, "is there twice") for name in numbers if numbers[name] > 1]
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
            is_large = any(max(map(abs, each.aminmax())) > most for each in (pair.a, pair.b))
            return f"has values beyond {most:g}, of the model's type" if is_large else ""
        if name not in self._known or last in UNSERVED:
            return UNSERVED.get(last, "is no linear layer of the model")
        what = f", {IF_NAMED[kind]}" if (kind := kind_of(name)) in IF_NAMED else ""
        return f"is left out: lora_target_modules does not have {kind!r}{what}"

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
        if len(a) != moe.num_experts or (found[0] == found[1] and not is_mixed):
            yield name, pair
            return
        if found == shape[::-1] and not is_mixed:
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
        ranks = {layer: torch.zeros_like(layer.ranks(slot), device="cpu") for layer in self._layers}
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
