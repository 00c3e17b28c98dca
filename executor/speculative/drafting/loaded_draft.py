"""Draft weights on the device, and the hidden states that a head needs from the target."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tllm_spec.attention.interface import SpecMetadata
from tllm_spec.distributed.communicator import Communicator
from tllm_spec.draft_network.network import ExternalDraft
from tllm_spec.executor.engine.rows import AttentionGroups
from tllm_spec.executor.speculative.drafting.draft_net import (
    CausalNet,
    DraftNet,
    HeadNet,
    KeyReadingNet,
)
from tllm_spec.executor.speculative.drafting.heads import (
    HEADS,
    DraftPlan,
    draft_folder,
    kind_of_head,
)
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.config_file import read_config
from tllm_spec.models.draft_head import MASK_TOKENS, DraftHead, HeadSource, head_kind, mask_token_in
from tllm_spec.models.draft_kind import TYPES, HeadKind, check_kind, naming_draft
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.layers import Placement
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.mtp import check_nextn
from tllm_spec.models.registry import model_config
from tllm_spec.models.token_map import DraftTokens, read_token_map
from tllm_spec.text.tokenizer import Tokenizer, has_vocabulary, load_tokenizer
from tllm_spec.text.vocabulary import have_same_ids, shared_tokens
from tllm_spec.zoo.registry import resolve_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedDraft:
    """A draft network that is loaded. `spec`: the hidden states that the target captures for a
    head. `kind`: of the head; None: it is a model."""

    plan: DraftPlan
    model: CausalLM | DraftHead | ExternalDraft
    spec: SpecMetadata | None
    kind: HeadKind | None = None

    def windowed(self, max_seq_len: int) -> "LoadedDraft":
        """The draft network with the plan's window, or else that of its config.json, where texts
        may be longer. With a sink, attention is given only the visible keys, and the layers see all
        of them. Raises ValueError where the network takes no other window."""
        assert not isinstance(self.model, ExternalDraft)
        size, config = self.plan.option("draft_window_size"), self.model.config.within(max_seq_len)
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
            assert self.spec is not None and isinstance(self.model, DraftHead)
            kind = HeadNet if self.model.has_keys else KeyReadingNet
            return kind(attention, self.model, self.spec)
        assert isinstance(self.model, CausalLM)
        return CausalNet(attention, self.model, vocab_size, mask_token(self.plan))


def mask_token(plan: DraftPlan) -> int | None:
    """The token that a draft model reads instead of drafts; None: it makes one after the other.
    Raises ValueError if neither the option nor the model names it, or it is not in the model's
    vocabulary."""
    if not plan.drafts_at_once:
        return None
    config, own = read_config(draft_folder(plan)), plan.option("mask_token_id")
    token = own if own is not None else mask_token_in(config)
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
    net: CausalLM | DraftHead,
    tokens: DraftTokens | None,
    communicator: Communicator,
    staged_for: torch.device | None = None,
) -> None:
    """Limits what `net` drafts to `tokens`; None: no limit. staged_for: as of `HeadSource`."""
    if tokens is not None:
        mapping = communicator.mapping
        if tokens.read_as is not None:
            tokens = tokens.divisible(mapping.tp_size)
        device, staged = staged_for or net.device, staged_for is not None
        own = Placement(net.dtype, device, mapping, communicator=communicator, staged=staged)
        net.keep_tokens(tokens, own)


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
    if unknown := model.config.unknown_keys:
        logger.warning(
            "%s: unknown keys are taken to change nothing that the head computes: %s",
            source.path / "config.json",
            ", ".join(unknown),
        )
    keep_tokens(model, tokens, source.communicator, source.staged_for)
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


# Checks of a draft model, a head or MTP modules before anything is loaded.


def check_draft(
    draft: DraftPlan | None, tokenizer: Tokenizer | None, target: ModelConfig
) -> DraftTokens | None:
    """The tokens that are drafted; None: all, under the target's ids. Raises ValueError, naming the
    option, when the folder has a head instead of a model, a model instead of a head or another kind
    of head, when a model's tokenizer has too few of the target's tokens, when there is no MTP
    module to draft with, and for options that the head or model does not have."""
    if draft is None:
        return None
    if draft.num_modules:
        exported = None if draft.path is None else draft_folder(draft)
        check_nextn(target, draft.num_modules, exported)
        return None
    folder = draft_folder(draft)
    if draft.is_assistant and draft.option("use_mtp_vanilla"):
        raise ValueError(
            f"use_mtp_vanilla = True is refused: {draft.path} is one network for all drafts, not "
            "a module for each"
        )
    _check_kind(draft, folder)
    if draft.is_head:
        ids = _ids_of_head(draft, folder, target)
        return None if ids is None else DraftTokens(ids, ids)
    with naming_draft():
        own = model_config(folder)
    if own.delta is not None:
        raise ValueError(
            f"speculative_config.speculative_model = {draft.path!r} is a {own.architecture}, "
            "which is served as a target only: a draft model's layers need keys and values"
        )
    return _tokens_of_model(draft, folder, tokenizer, target.vocab_size, own.vocab_size)


def _tokens_of_model(
    draft: DraftPlan, folder: Path, tokenizer: Tokenizer | None, vocab_size: int, own_size: int
) -> DraftTokens | None:
    mask = mask_token(draft)
    other = None if tokenizer is None else _tokenizer_of(folder)
    if tokenizer is None or other is None or have_same_ids(tokenizer, other):
        ids = _mapped_ids(draft, min(vocab_size, own_size))
        return None if ids is None else DraftTokens(ids, ids)
    if draft.backend != "torch":
        raise ValueError(
            f"speculative_config.draft_backend = {draft.backend!r} is refused: the draft model's "
            "tokenizer is not the target's, and its network has no token map; accepted: 'torch'"
        )
    ids = _mapped_ids(draft, vocab_size)
    with naming_draft():
        shared = shared_tokens(tokenizer, other, vocab_size, own_size)
        tokens = DraftTokens.of_shared(shared, vocab_size, ids, mask)
    logger.warning(
        "the draft model's tokenizer is not the target's: %d tokens that both have are drafted, "
        "and tokens that it lacks are read as their longest end, or else as its id %d",
        *(len(tokens.ids), shared.unknown),
    )
    return tokens


def _tokenizer_of(folder: Path) -> Tokenizer | None:
    if not has_vocabulary(folder):
        logger.warning("%s has no tokenizer; its token ids are taken to be the target's", folder)
        return None
    with naming_draft():
        return load_tokenizer(str(folder))


def _check_kind(draft: DraftPlan, folder: Path) -> None:
    kind = head_kind(folder)
    check_kind(str(draft.path), kind, read_config(folder), draft.kinds)
    if kind is not None and TYPES[kind] != TYPES[draft.kinds[0]]:
        logger.warning(
            "decoding_type = %r is served as %s: the folder has an %s head",
            TYPES[draft.kinds[0]],
            TYPES[kind],
            kind,
        )


def _ids_of_head(draft: DraftPlan, folder: Path, target: ModelConfig) -> torch.Tensor | None:
    """As `_mapped_ids`. Raises ValueError with all options that the head does not have."""
    mistakes, ids = _head_mistakes(draft, folder, target), None
    try:
        ids = _mapped_ids(draft, target.vocab_size)
    except ValueError as error:
        mistakes.insert(0, str(error))
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return ids


def _head_mistakes(draft: DraftPlan, folder: Path, target: ModelConfig) -> list[str]:
    kind = kind_of_head(draft, folder)
    own = HEADS[kind].read_config(draft, folder)
    if not isinstance(own, Eagle3Config):
        if draft.capture_layers is None:
            return []
        return [
            f"eagle3_layers_to_capture = {list(draft.capture_layers)} is refused: an {kind} head "
            "reads the target's last hidden state only; accepted: null"
        ]
    token_map = draft.option("speculative_token_map")
    size = own.output_size if token_map else None
    if size in (None, target.vocab_size):
        return []
    return [
        f"speculative_config.speculative_token_map = {token_map!r} is refused: the {kind} "
        f"head has a vocabulary of its own, {size} tokens that its d2t maps to the target's; "
        "accepted: null"
    ]


def _mapped_ids(draft: DraftPlan, vocab_size: int) -> torch.Tensor | None:
    """`[V_draft]`: the ids of the mode's token map, below `vocab_size`; None: it has none. Raises
    ValueError with the option's name for a file that is no token map."""
    file = draft.option("speculative_token_map")
    if file is None:
        return None
    try:
        return read_token_map(resolve_file(file), vocab_size)
    except ValueError as error:
        raise ValueError(f"speculative_config.speculative_token_map: {error}") from None
