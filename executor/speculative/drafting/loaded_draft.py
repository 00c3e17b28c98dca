"""Draft weights on the device, and the hidden states that a head needs from the target."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from tllm_spec.attention.interface import SpecMetadata, default_capture_layers
from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.draft_network.network import ExternalDraft
from tllm_spec.executor.engine.attention_groups import AttentionGroups
from tllm_spec.executor.speculative.drafting.draft_net import (
    CausalNet,
    DFlashNet,
    DraftNet,
    HeadNet,
    NextnNet,
    TorchLayers,
)
from tllm_spec.executor.speculative.modes import DraftPlan
from tllm_spec.models.causal_lm import CausalLM
from tllm_spec.models.config_file import read_config
from tllm_spec.models.dflash import DFlashHead, load_dflash_head
from tllm_spec.models.dflash_config import DFlashConfig
from tllm_spec.models.draft_head import DraftHead, HeadSource, target_modules
from tllm_spec.models.draft_kind import HeadKind
from tllm_spec.models.eagle import EagleHead, load_eagle_head
from tllm_spec.models.eagle3 import Eagle3Head, load_eagle3_head
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.eagle_config import EagleConfig
from tllm_spec.models.head_checkpoint import MASK_TOKENS, head_kind, mask_token_in
from tllm_spec.models.llama import LlamaForCausalLM
from tllm_spec.models.module import Placement
from tllm_spec.models.mtp import NextnModules, load_nextn
from tllm_spec.models.nextn_checkpoint import exported_config
from tllm_spec.models.registry import LoadFormat, blank_placement
from tllm_spec.models.token_map import DraftTokens
from tllm_spec.zoo.registry import resolve_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedDraft:
    """A draft network that is loaded. `spec`: the hidden states that the target captures for a
    head."""

    plan: DraftPlan
    model: CausalLM | DraftHead | NextnModules | ExternalDraft
    spec: SpecMetadata | None

    def windowed(self, max_seq_len: int) -> "LoadedDraft":
        """The draft network with the plan's window, or else that of its config.json, where texts
        may be longer. With a sink, attention is given only the visible keys, and the layers see all
        of them. Raises ValueError where the network takes no other window."""
        assert not isinstance(self.model, ExternalDraft)
        size, config = self.plan.window_size, self.model.config.within(max_seq_len)
        is_whole = size is None or size >= max_seq_len
        if size is None or (is_whole and config.sliding_window is None):
            self.model.config = config
            return self
        try:
            own = None if is_whole or self.plan.sink_size is not None else size
            self.model.config = config.windowed(own)
        except ValueError as error:
            raise ValueError(f"draft_window_size = {size} is refused: {error}") from None
        return self

    def layers(self, attention: AttentionGroups, vocab_size: int) -> TorchLayers:
        """A network in torch as layers on the target's pages; `vocab_size` is the target's."""
        net: DraftNet
        if isinstance(self.model, DraftHead):
            assert self.spec is not None
            if isinstance(self.model, DFlashHead):
                net = DFlashNet(self.model, self.spec)
            else:
                net = HeadNet(self.model, self.spec)
        elif isinstance(self.model, NextnModules):
            assert self.spec is not None
            net = NextnNet(self.model, self.spec)
        else:
            assert not isinstance(self.model, ExternalDraft)
            net = CausalNet(self.model, vocab_size, mask_token(self.plan))
        return TorchLayers(net, attention)


def draft_folder(plan: DraftPlan) -> Path:
    """The folder of draft weights that are not the target's. Raises ValueError with the option's
    name if it does not exist."""
    assert plan.path is not None
    try:
        return resolve_model(plan.path)
    except ValueError as error:
        raise ValueError(f"speculative_config.speculative_model: {error}") from None


def mask_token(plan: DraftPlan) -> int | None:
    """The token that a draft model reads instead of drafts; None: it makes one after the other.
    Raises ValueError if neither the option nor the model names it, or it is not in the model's
    vocabulary."""
    if not plan.drafts_at_once:
        return None
    config = read_config(draft_folder(plan))
    token = plan.mask_token if plan.mask_token is not None else mask_token_in(config)
    if token is None:
        raise ValueError(
            f"speculative_config.mask_token_id is needed, since config.json of {plan.path} names "
            f"no mask token ({', '.join(MASK_TOKENS)})"
        )
    if (size := config["vocab_size"]) <= token:
        raise ValueError(
            f"speculative_config.mask_token_id = {token} is not a token of {plan.path}, whose "
            f"vocabulary has {size}"
        )
    return token


def dflash_config(plan: DraftPlan, folder: Path) -> DFlashConfig:
    """Reads the configuration of the folder's head; the mode's mask token and layers go before.
    Raises ValueError if there is no mask token, or the head was not trained for so many drafts."""
    config = DFlashConfig.from_pretrained(folder)
    token = plan.mask_token if plan.mask_token is not None else config.mask_token
    if token is None:
        raise ValueError(
            f"speculative_config.mask_token_id is needed, since config.json of {plan.path} names "
            "none"
        )
    if plan.num_filled >= config.block_size:
        raise ValueError(
            f"max_draft_len = {plan.num_filled} is refused: the DFlash head in {plan.path} has "
            f"block_size {config.block_size}, of which one is no draft"
        )
    layers = plan.capture_layers or config.capture_layers
    return replace(config, mask_token=token, capture_layers=layers)


def load_mtp(
    plan: DraftPlan,
    target: CausalLM,
    folder: Path,
    load_format: LoadFormat,
    *,
    max_num_tokens: int,
    communicator: Communicator = SINGLE,
    fp8_activations: bool = True,
) -> LoadedDraft:
    """Load MTP modules from the target's checkpoint or the plan's. Raises ValueError if tensors are
    missing or surplus."""
    assert isinstance(target, LlamaForCausalLM)
    is_exported = plan.path is not None
    modules = load_nextn(
        folder,
        target,
        load_format,
        plan.num_modules,
        communicator,
        is_exported=is_exported,
        fp8_activations=fp8_activations,
    )
    config = target.config
    spec = SpecMetadata(
        (config.num_layers,), config.hidden_size, max_num_tokens, target.dtype, target.device
    )
    return LoadedDraft(plan, modules, spec)


def kind_of_head(plan: DraftPlan, folder: Path) -> HeadKind:
    """What the head in the folder is; one that does not say is of the mode's first kind."""
    return head_kind(folder) or plan.head_kinds[0]


def keep_tokens(
    net: CausalLM | DraftHead, tokens: DraftTokens | None, communicator: Communicator
) -> None:
    """Limits what `net` drafts to `tokens`; None: no limit."""
    if tokens is not None:
        mapping = communicator.mapping
        if tokens.read_as is not None:
            tokens = tokens.divisible(mapping.tp_size)
        net.keep_tokens(
            tokens, Placement(net.dtype, net.device, mapping, communicator=communicator)
        )


def load_head(
    plan: DraftPlan,
    target: CausalLM,
    tokens: DraftTokens | None,
    *,
    max_positions: int,
    max_num_tokens: int,
    communicator: Communicator = SINGLE,
) -> LoadedDraft:
    """Load an EAGLE head. tokens: that it drafts; None: all. Raises ValueError if the head does not
    fit the target, or if the target lacks the layers to capture."""
    folder, config = draft_folder(plan), target.config
    source = HeadSource(folder, target, plan.load_format, max_positions, communicator)
    head: DraftHead
    kind = kind_of_head(plan, folder)
    if kind == "EAGLE-3":
        layers = _captured_layers(plan, folder, config.num_layers)
        head = load_eagle3_head(source, len(layers))
    elif kind == "DFlash":
        of_dflash = dflash_config(plan, folder)
        layers = _captured_layers(plan, folder, config.num_layers)
        head = load_dflash_head(source, of_dflash, len(layers))
    else:
        layers = (config.num_layers,)  # the final norm
        head = load_eagle_head(source)
    if unknown := head.config.unknown_keys:
        logger.warning(
            "%s: unknown keys are taken to change nothing that the head computes: %s",
            folder / "config.json",
            ", ".join(unknown),
        )
    keep_tokens(head, tokens, communicator)
    spec = SpecMetadata(layers, config.hidden_size, max_num_tokens, target.dtype, target.device)
    return LoadedDraft(plan, head, spec)


def blank_head(plan: DraftPlan, target: CausalLM, device: torch.device) -> nn.Module:
    """A head, or MTP modules, for a blank target of `device`: the weights that are not the
    target's, as far as config.json tells of them. Raises ValueError as loading them does."""
    config, mapping = target.config, target_modules(target)[1].mapping
    if plan.num_modules:
        assert isinstance(target, LlamaForCausalLM)
        own = config if plan.path is None else exported_config(draft_folder(plan), config)
        placement = blank_placement(own, target.dtype, device, mapping)
        return NextnModules(target, plan.num_modules, placement)
    placement, folder = Placement(target.dtype, target.device, mapping), draft_folder(plan)
    if kind_of_head(plan, folder) == "EAGLE-1/2":
        of_eagle = EagleConfig.from_pretrained(folder)
        of_eagle.check_target(config)
        return EagleHead(of_eagle, target, 1, placement, has_bias=False, has_input_norm=False)
    num_captured = len(_captured_layers(plan, folder, config.num_layers))
    if kind_of_head(plan, folder) == "DFlash":
        of_dflash = dflash_config(plan, folder).for_target(config, num_captured)
        return DFlashHead(of_dflash, target, num_captured, 1, placement, of_dflash.own_modules)
    of_eagle3 = Eagle3Config.from_pretrained(folder).for_target(config, num_captured)
    return Eagle3Head(of_eagle3, target, num_captured, 1, placement, of_eagle3.own_modules)


def _captured_layers(plan: DraftPlan, folder: Path, num_layers: int) -> tuple[int, ...]:
    """The layers that an EAGLE-3 or DFlash head reads. Raises ValueError if the target lacks
    them."""
    name = "eagle3_layers_to_capture"
    if kind_of_head(plan, folder) == "DFlash":
        name, config = "target_layer_ids", dflash_config(plan, folder)
        own = config.capture_layers or config.default_layers(num_layers)
    else:
        own = Eagle3Config.from_pretrained(folder).capture_layers or ()
    layers = plan.capture_layers or own or default_capture_layers(num_layers)
    outside = [layer for layer in layers if not 0 <= layer < num_layers]
    if outside:
        raise ValueError(
            f"{name} = {list(layers)}: the target has layers 0 to "
            f"{num_layers - 1}, and not {outside}"
        )
    return layers
