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
from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.kernels.drafts.draft_input import DraftInputNorms
from tllm_spec.models.checkpoint import checkpoint_tensors
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.deepseek import DeepseekLayer
from tllm_spec.models.draft_head import HeadSource
from tllm_spec.models.formats.quantised_layers import (
    computed_as,
    log_quantised,
    prepare_quantised,
    with_quantised,
)
from tllm_spec.models.head_checkpoint import EMBEDDING
from tllm_spec.models.head_copies import drop_copies
from tllm_spec.models.layers import Embedding, RMSNorm
from tllm_spec.models.linear import Linear, OutputLinear
from tllm_spec.models.llama import MLP, LlamaForCausalLM
from tllm_spec.models.module import Module, Placement, StoredWeight, specialize_for_cpu
from tllm_spec.models.moe import SparseMoE
from tllm_spec.models.moe_shape import DEEPSEEK_NAMES
from tllm_spec.models.nextn_checkpoint import exported_config
from tllm_spec.models.nextn_step import NextnStep
from tllm_spec.models.qwen3_next import Qwen3NextForCausalLM
from tllm_spec.models.qwen3_next_mtp import Qwen3NextModule
from tllm_spec.models.registry import LoadFormat
from tllm_spec.models.tied_output import OUTPUT, is_same
from tllm_spec.models.weights import fill, fill_random, load_tensor, stored_tensors, weight_table

# The embedding and the output layer, which a checkpoint has in each module, by their names in a
# module. All modules have the same ones.
SHARED = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": OUTPUT}


class SharedHead(Module):
    """The norm before the target's output layer."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement)


class NextnModule(NextnStep, DeepseekLayer):
    """DeepSeek's and GLM's. Module paths are the checkpoint's names below `model.layers.N.`."""

    eh_proj: Linear

    def __init__(self, target: LlamaForCausalLM, index: int, placement: Placement) -> None:
        config = target.config
        # Not a submodule: the target's weights are not this checkpoint's.
        self.__dict__["target"] = target
        super().__init__(config, index, placement)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(size, eps, placement)
        self.hnorm = RMSNorm(size, eps, placement)
        self.norms = DraftInputNorms(self.enorm.weight, self.hnorm.weight, eps)
        self.eh_proj = Linear(2 * size, size, bias=False, placement=placement.wide)
        self.shared_head = SharedHead(config, placement)

    def add_attention(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        self.target.layer_type.add_attention(self, config, layer, placement)

    def add_mlp(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        """A module has experts if the model has any."""
        moe = config.moe
        self.mlp = SparseMoE(moe, placement, DEEPSEEK_NAMES) if moe else MLP(config, placement)

    @staticmethod
    def prefix(number: int) -> str:
        return f"model.layers.{number}."

    @property
    def layer(self) -> DeepseekLayer:
        return self

    @property
    def last_norm(self) -> RMSNorm:
        return self.shared_head.norm


def module_type(target: LlamaForCausalLM) -> type[NextnModule] | type[Qwen3NextModule]:
    """The class of the target's modules."""
    return Qwen3NextModule if isinstance(target, Qwen3NextForCausalLM) else NextnModule


class NextnModules(Module):
    """One module that makes every step, or a module for each step. Each has a layer of the draft
    network's KV pool. Its drafts are the target's ids, one after the other."""

    target: LlamaForCausalLM
    draft_to_target = None
    masks = None

    def __init__(
        self, target: LlamaForCausalLM, count: int, placement: Placement, owns: Collection[str] = ()
    ) -> None:
        """owns: `EMBEDDING` and `OUTPUT`, if they are not the target's."""
        super().__init__()
        config = self.config = replace(target.config, num_layers=count, delta=None)
        sizes, wide = (config.vocab_size, config.hidden_size), placement.wide
        self.embed_tokens = Embedding(*sizes, wide) if EMBEDDING in owns else None
        self.lm_head = OutputLinear(*sizes[::-1], placement=wide) if OUTPUT in owns else None
        kind = module_type(target)
        steps = [kind(target, index, placement) for index in range(count)]
        self.steps = nn.ModuleList(steps)
        self.modules_by_step = steps
        # Not a submodule, as above.
        self.__dict__["target"] = target

    @property
    def num_logits(self) -> int:
        """Logits of one row."""
        return self.config.vocab_size

    @property
    def output(self) -> OutputLinear:
        """The modules' own output layer, or the target's."""
        return self.lm_head or self.target.lm_head

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        """States after the target's final norm are read as they are, `[T, H]`."""
        return captured

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters and activations: the target's."""
        return self.target.dtype

    @property
    def device(self) -> torch.device:
        return self.target.device

    def predict(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        context: ForwardContext,
        step: int,
    ) -> torch.Tensor:
        """As `NextnStep.predict`. The modules of later steps only write their KV: they attend to
        the rows of all steps before."""
        modules = self.modules_by_step
        embedding = self.embed_tokens or self.target.model.embed_tokens
        looked_up = embedding.lookup(input_ids)  # a sum, if it is sharded
        if len(modules) == 1:
            return modules[0].predict(input_ids, positions, hidden, context, looked_up)
        only_writes = replace(context, wanted=input_ids[:0])
        for later in modules[step + 1 :]:
            later.predict(input_ids, positions, hidden, only_writes, looked_up)
        return modules[step].predict(input_ids, positions, hidden, context, looked_up)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, H]`, as `predict` returns it, to `[R, V]`."""
        return self.output.forward(hidden)


def check_nextn(config: ModelConfig, num_modules: int, exported: Path | None = None) -> None:
    """Raises ValueError unless the target's checkpoint, or the folder `exported`, has the modules
    to draft with. config: the target's."""
    if exported is not None:
        if config.mla is None:
            raise ValueError(
                "speculative_model with decoding_type = 'MTP' is served for DeepSeek models, and "
                "the target is a "
                f"{config.architecture}"
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


def load_nextn(
    path: Path,
    target: LlamaForCausalLM,
    load_format: LoadFormat,
    count: int = 1,
    communicator: Communicator = SINGLE,
    *,
    is_exported: bool = False,
    fp8_activations: bool = True,
) -> NextnModules:
    """The first `count` modules of the folder `path`, the target's checkpoint or an exported one,
    in the target's dtype and on its device, sharded as the target's layers are. fp8_activations:
    of exported modules, as in `load_model`; others are computed as the target.

    Raises:
        ValueError: tensors are missing or surplus, or exported modules are not for the target.
    """
    config, first = target.config, target.config.num_layers
    known = None
    if is_exported:
        config, first = computed_as(exported_config(path, config), fp8_activations), 0
        # Everything else in such a folder is surplus.
        known = tuple(f"model.layers.{number}." for number in range(config.num_layers))
    placement = Placement(
        target.dtype, target.device, communicator.mapping, communicator=communicator
    )
    placement = with_quantised(placement, config)
    if is_exported:
        log_quantised(path, config, placement)
    prefixes = [module_type(target).prefix(first + index) for index in range(count)]
    shared = {}
    if load_format != "dummy":
        source = HeadSource(path, target, load_format, max_positions=0, communicator=communicator)
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
            tensors = _below(prefix, path, config, known)
            fill(module, tensors, f"The tensors {prefix}* in {path} do not fit an MTP module")
    specialize_for_cpu(modules, placement)
    return modules


def _shared(prefixes: list[str], source: HeadSource) -> dict[str, torch.Tensor]:
    """The embedding and the output layer in the modules at `prefixes`, without copies of the
    target's. Raises ValueError if the modules have different ones."""
    found: dict[str, torch.Tensor] = {}
    names = {prefix + name: own for prefix in prefixes for name, own in SHARED.items()}
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
    prefix: str, path: Path, config: ModelConfig, known: tuple[str, ...] | None
) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
    """The tensors below `prefix`, without it, and those below none of the prefixes `known`."""

    def is_wanted(name: str) -> bool:
        return name.startswith(prefix) or (known is not None and not name.startswith(known))

    for name, tensor in stored_tensors(path, config, is_wanted):
        name = name.removeprefix(prefix)
        if name not in SHARED:
            yield name, tensor
