"""Next-token-prediction modules (MTP, arXiv 2412.19437, section 2.2) as a draft network: those in
the target's checkpoint, of DeepSeek also in an exported one of their own.

A module reads a token and the target's hidden state before it; the next step reads the output of
the step before instead of the target's state. Used as in EAGLE, one module makes all steps;
"vanilla", each step has a module. The rotary table is the target's, and so are the embedding and
the output layer unless the checkpoint has others."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.drafts.draft_input import DraftInputNorms, draft_input
from tllm_spec.models.checkpoint import OUTPUT, checkpoint_tensors, is_same
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.config_file import read_config
from tllm_spec.models.draft_head import (
    EMBEDDING,
    DraftHead,
    HeadRows,
    HeadSource,
    drop_copies,
    target_modules,
)
from tllm_spec.models.draft_kind import MODULES, is_exported, is_fine_tuned
from tllm_spec.models.formats.quantised_layers import (
    computed_as,
    log_quantised,
    prepare_quantised,
    with_quantised,
)
from tllm_spec.models.layers import (
    Embedding,
    Module,
    Placement,
    RMSNorm,
    StoredWeight,
    specialize_for_cpu,
)
from tllm_spec.models.linear import Linear, OutputLinear
from tllm_spec.models.llama import CausalLM, DecoderLayer, layer_norm
from tllm_spec.models.registry import model_config_of
from tllm_spec.models.weights import fill, fill_random, load_tensor, weight_table

# Folders that have next-token-prediction modules and nothing else: SGLang exports the last layer
# of a DeepSeek V3 so, as `model.layers.0`, with its copies of the target's weights left out, and
# speculators the module of a Qwen3-Next or Qwen3.5 that it has trained further, with names of its
# own and perhaps frozen copies of the target's embedding and output layer.
_FINE_TUNED = {
    "mtp_layers.0.input_proj.": "mtp.fc.",
    "mtp_layers.0.final_layernorm.": "mtp.norm.",
    "mtp_layers.0.hidden_layernorm.": "mtp.pre_fc_norm_hidden.",
    "mtp_layers.0.token_layernorm.": "mtp.pre_fc_norm_embedding.",
    "mtp_layers.0.": "mtp.layers.0.",
}


def _native(name: str) -> str:
    """The name in the target's checkpoint of a tensor of such a folder."""
    found = next((each for each in _FINE_TUNED.items() if name.startswith(each[0])), None)
    return name if found is None else found[1] + name.removeprefix(found[0])


# What a module computes with.
SHAPE = (
    *("architecture", "vocab_size", "hidden_size", "num_heads", "intermediate_size"),
    *("rms_norm_eps", "rope", "mla", "moe"),
)


def exported_config(folder: Path, target: ModelConfig) -> ModelConfig:
    """The configuration of an exported folder; its layers are the modules.

    Raises:
        ValueError: the folder is not an exported one, or its modules are not for the target.
    """
    raw = read_config(folder)
    if not is_exported(raw):
        raise ValueError(
            f"speculative_config.speculative_model = {str(folder)!r} must be a folder of exported "
            f"MTP modules, whose architectures is ['{target.architecture}{MODULES}']; it is "
            f"{raw.get('architectures')}"
        )
    if is_fine_tuned(raw):
        layer = {**(raw.get("transformer_layer_config") or {}), "quantization_config": None}
        own = model_config_of(layer | {"architectures": [target.architecture]}, folder)
        own = replace(own, num_layers=own.num_nextn_layers, delta=None)
    else:
        name = raw["architectures"][0].removesuffix(MODULES)
        own = model_config_of(raw | {"architectures": [name]}, folder)
    differing = [key for key in SHAPE if getattr(own, key) != getattr(target, key)]
    if differing:
        shown = "; ".join(
            f"{key}: {getattr(own, key)}, and {getattr(target, key)} of the target"
            for key in differing
        )
        raise ValueError(
            f"speculative_config.speculative_model = {str(folder)!r} is not for this target: "
            f"{shown}"
        )
    return own


# The embedding and the output layer, which a checkpoint has in each module, by their names in a
# module. All modules have the same ones.
SHARED = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": OUTPUT}


class NextnModule(Module):
    """A decoder layer whose input is projected from the normed embedding and the normed hidden
    state. Module paths are the checkpoint's names below `CausalLM.nextn_prefix`."""

    target: CausalLM
    norms: DraftInputNorms
    eh_proj: Linear
    layer: DecoderLayer
    last_norm: RMSNorm

    def __init__(
        self, target: CausalLM, config: ModelConfig, index: int, placement: Placement
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        embedding_norm, hidden_norm = (layer_norm(config, placement) for _ in range(2))
        eh_proj = Linear(2 * size, size, bias=False, placement=placement.wide)
        last_norm = layer_norm(config, placement)
        # A layer with a recurrent state is none of a module's.
        layer = target.layer_type(config, index, placement)
        modules = embedding_norm, hidden_norm, eh_proj, last_norm, layer
        for name, module in zip(target.nextn_names, modules, strict=True):
            _put(self, name, module)
        weights = embedding_norm.weight, hidden_norm.weight
        norms = DraftInputNorms(*weights, eps, target.nextn_hides_first)
        # Not submodules: they have no names of their own, and the target's weights are not these.
        self.__dict__ |= {"target": target, "norms": norms, "eh_proj": eh_proj}
        self.__dict__ |= {"layer": layer, "last_norm": last_norm}

    def predict(
        self,
        rows: HeadRows,
        context: ForwardContext,
        looked_up: tuple[torch.Tensor | None, torch.Tensor],
    ) -> torch.Tensor:
        """One step, from the target's states after its final norm, or the result of the step
        before.

        Args:
            context: of the module's own KV pool.
            looked_up: what `Embedding.lookup` gives for the ids.

        Returns:
            `[T, H]`, or `[R, H]` of the rows that the context wants, after the module's final norm:
            for `compute_logits` and for the next step.
        """
        input_ids, positions, hidden = rows
        rotary = Rotary(self.target.model.cos_sin, positions)
        given = draft_input(*looked_up, hidden, self.norms, rotary, input_ids[:0])
        total = self.eh_proj.forward(given.both)
        total = self.layer.forward(total, rotary, context, context.wanted)
        return self.last_norm.forward(total) if len(total) else total


def _put(parent: Module, path: str, module: Module) -> None:
    """Adds a submodule under a path; without one, the submodule's own submodules."""
    if not path:
        for name, child in module.named_children():
            setattr(parent, name, child)
        return
    *outer, last = path.split(".")
    for name in outer:
        parent.add_module(name, Module())
        parent = getattr(parent, name)
    setattr(parent, last, module)


class NextnModules(DraftHead):
    """One module that makes every step, or a module for each step. Each has a layer of the draft
    network's KV pool. Its drafts are the target's ids, one after the other."""

    def __init__(
        self, target: CausalLM, count: int, placement: Placement, owns: Collection[str] = ()
    ) -> None:
        """owns: `EMBEDDING` and `OUTPUT`, if they are not the target's."""
        super().__init__()
        sparse = frozenset(range(count)) if target.config.sparse_layers else frozenset[int]()
        config = replace(target.config, num_layers=count, delta=None, sparse_layers=sparse)
        if (mla := config.mla) is not None and mla.indexer is not None:  # each has an own one
            indexer = replace(mla.indexer, shared_layers=frozenset())
            config = replace(config, mla=replace(mla, indexer=indexer))
        self.config = config
        self.shares_choice = (
            count == 1 and config.indexer is not None and config.indexer.is_shared_by_steps
        )
        """Whether later steps attend to the keys that the first one has chosen."""
        sizes, wide = (config.vocab_size, config.hidden_size), placement.wide
        self.embed_tokens = Embedding(*sizes, wide) if EMBEDDING in owns else None
        self.lm_head = OutputLinear(*sizes[::-1], placement=wide) if OUTPUT in owns else None
        steps = [NextnModule(target, config, index, placement) for index in range(count)]
        self.steps = nn.ModuleList(steps)
        self.modules_by_step = steps
        self.borrowed = target_modules(target)

    def forward(self, rows: HeadRows, context: ForwardContext, step: int = 0) -> torch.Tensor:
        """As `NextnModule.predict`. The modules of later steps only write their KV: they attend to
        the rows of all steps before."""
        modules, looked_up = self.modules_by_step, self.embedding.lookup(rows.input_ids)
        if len(modules) == 1:
            return modules[0].predict(rows, context, looked_up)
        only_writes = replace(context, wanted=rows.input_ids[:0])
        for later in modules[step + 1 :]:
            later.predict(rows, only_writes, looked_up)
        return modules[step].predict(rows, context, looked_up)


def check_nextn(config: ModelConfig, num_modules: int, exported: Path | None = None) -> None:
    """Raises ValueError unless the target's checkpoint, or the folder `exported`, has the modules
    to draft with. config: the target's."""
    if exported is not None:
        fine_tuned = is_fine_tuned(read_config(exported))
        if (config.delta if fine_tuned else config.mla) is None:
            served = "Qwen3-Next and Qwen3.5" if fine_tuned else "DeepSeek models"
            raise ValueError(
                f"speculative_model = {str(exported)!r} with decoding_type = 'MTP' is served for "
                f"{served}, and the target is a {config.architecture}"
            )
        available, key = exported_config(exported, config).num_layers, "num_hidden_layers"
    else:
        available, key = config.num_nextn_layers, "num_nextn_predict_layers"
    if not available:
        raise ValueError(
            "decoding_type = 'MTP' drafts with the next-token-prediction layers of the target's "
            f"checkpoint, and num_nextn_predict_layers of this {config.architecture} is 0; "
            "speculative_model may name a folder that has them"
        )
    if available < num_modules:
        where = exported or f"this {config.architecture}"
        raise ValueError(
            f"use_mtp_vanilla = True with max_draft_len = {num_modules} needs a module for each "
            f"draft; {key} of {where} is {available}"
        )


def load_nextn(source: HeadSource, count: int = 1, *, is_exported: bool = False) -> NextnModules:
    """The first `count` modules of the folder, the target's checkpoint or an exported one, in the
    target's dtype and on its device, sharded as the target's layers are. Modules that are not
    exported are computed as the target.

    Raises:
        ValueError: tensors are missing or surplus, or exported modules are not for the target.
    """
    path, target, load_format = source.path, source.target, source.load_format
    config, first = target.config, target.config.num_layers
    known = None
    if is_exported:
        config, first = computed_as(exported_config(path, config), source.fp8_activations), 0
        # Everything else in such a folder is surplus.
        known = tuple(map(target.nextn_prefix, range(config.num_layers)))
    placement = with_quantised(source.placement, config)
    if is_exported:
        log_quantised(path, config, placement)
    prefixes = [target.nextn_prefix(first + index) for index in range(count)]
    shared = {}
    if load_format != "dummy":
        shared = _shared(prefixes, source)
    modules = NextnModules(target, count, placement, owns=shared)
    parts = dict(zip(prefixes, modules.modules_by_step, strict=True))
    prepare_quantised(parts, path, config, load_format, placement)
    if load_format == "dummy":
        fill_random(modules)
    else:
        slots = weight_table(modules)
        for name, tensor in shared.items():
            load_tensor(name, tensor, slots[name])
        for prefix, module in parts.items():
            tensors = _below(target, prefix, path, config, known)
            fill(module, tensors, f"The tensors {prefix}* in {path} do not fit an MTP module")
    specialize_for_cpu(modules, placement)
    return modules


def _shared(prefixes: list[str], source: HeadSource) -> dict[str, torch.Tensor]:
    """The embedding and the output layer in the modules at `prefixes`, without copies of the
    target's. Raises ValueError if the modules have different ones."""
    found: dict[str, torch.Tensor] = {}
    names = {prefix + name: own for prefix in prefixes for name, own in SHARED.items()}
    if is_fine_tuned(read_config(source.path)):
        names = {EMBEDDING: EMBEDDING, OUTPUT: OUTPUT}
    for stored, tensor in checkpoint_tensors(source.path, lambda name: name in names):
        first = found.setdefault(names[stored], tensor)
        if not is_same(first, tensor, source.target.dtype):
            raise ValueError(
                f"{stored} in {source.path} differs from that of another MTP module; served are "
                "modules with the same embedding and output layer."
            )
    drop_copies(found, source)
    return found


def _below(
    target: CausalLM, prefix: str, path: Path, config: ModelConfig, known: tuple[str, ...] | None
) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
    """The tensors below `prefix`, without it, and those below none of the prefixes `known`."""

    def is_wanted(name: str) -> bool:
        name = _native(name)
        return name.startswith(prefix) or (known is not None and not name.startswith(known))

    for name, tensor in target.stored_tensors(path, config, is_wanted):
        name = _native(name).removeprefix(prefix)
        if name not in SHARED and name != OUTPUT:
            yield name, tensor
