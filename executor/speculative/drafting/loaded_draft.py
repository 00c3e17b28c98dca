"""Draft weights on the device, and the hidden states that a head needs from the target."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tllm_spec.attention.interface import SpecMetadata
from tllm_spec.distributed.communicator import Communicator
from tllm_spec.draft_network.network import ExternalDraft
from tllm_spec.executor.engine.attention_groups import AttentionGroups
from tllm_spec.executor.speculative.drafting.draft_net import CausalNet, DraftNet
from tllm_spec.executor.speculative.drafting.heads import (
    HEADS,
    DraftPlan,
    draft_folder,
    kind_of_head,
)
from tllm_spec.models.config_file import read_config
from tllm_spec.models.draft_head import MASK_TOKENS, DraftHead, HeadSource, mask_token_in
from tllm_spec.models.draft_kind import HeadKind
from tllm_spec.models.layers import Placement
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.mtp import NextnModules
from tllm_spec.models.token_map import DraftTokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedDraft:
    """A draft network that is loaded. `spec`: the hidden states that the target captures for a
    head. `kind`: of the head; None: it is a model."""

    plan: DraftPlan
    model: CausalLM | DraftHead | NextnModules | ExternalDraft
    spec: SpecMetadata | None
    kind: HeadKind | None = None

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
            own = None if is_whole or self.plan.sees is not None else size
            self.model.config = config.windowed(own)
        except ValueError as error:
            raise ValueError(f"draft_window_size = {size} is refused: {error}") from None
        return self

    def net(self, attention: AttentionGroups, vocab_size: int) -> DraftNet:
        """A network in torch on the pages of `attention`; `vocab_size` is the target's."""
        if self.kind is not None:
            assert self.spec is not None
            return HEADS[self.kind].net(attention, self.model, self.spec)
        assert isinstance(self.model, CausalLM)
        return CausalNet(attention, self.model, vocab_size, mask_token(self.plan))


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
    plan: DraftPlan, source: HeadSource, tokens: DraftTokens | None, max_num_tokens: int
) -> LoadedDraft:
    """Loads a head, or MTP modules. tokens: that it drafts; None: all. Raises ValueError if it does
    not fit the target, if the target lacks the layers to capture, or if tensors are missing or
    surplus."""
    target, kind = source.target, kind_of_head(plan, source.path)
    head, of_target = HEADS[kind], target.config
    config = head.read_config(plan, source.path)
    layers = head.layers(plan, config, of_target.num_layers)
    model = head.load(plan, source, config, len(layers))
    if isinstance(model, DraftHead):
        if unknown := model.config.unknown_keys:
            logger.warning(
                "%s: unknown keys are taken to change nothing that the head computes: %s",
                source.path / "config.json",
                ", ".join(unknown),
            )
        keep_tokens(model, tokens, source.communicator)
    spec = SpecMetadata(layers, of_target.hidden_size, max_num_tokens, target.dtype, target.device)
    return LoadedDraft(plan, model, spec, kind)


def blank_head(plan: DraftPlan, target: CausalLM, device: torch.device) -> nn.Module:
    """A head, or MTP modules, for a blank target of `device`: the weights that are not the
    target's, as far as config.json tells of them. Raises ValueError as loading them does."""
    folder = Path() if plan.path is None else draft_folder(plan)
    head = HEADS[kind_of_head(plan, folder)]
    config = head.read_config(plan, folder)
    layers = head.layers(plan, config, target.config.num_layers)
    return head.blank(plan, target, config, len(layers), device)
