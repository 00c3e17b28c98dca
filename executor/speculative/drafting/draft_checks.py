"""Checks of a draft model, a head or MTP modules before anything is loaded."""

import logging
from pathlib import Path

import torch

from tllm_spec.executor.speculative.drafting.heads import (
    HEADS,
    DraftPlan,
    draft_folder,
    kind_of_head,
)
from tllm_spec.executor.speculative.drafting.loaded_draft import mask_token
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.config_file import read_config
from tllm_spec.models.draft_head import head_kind
from tllm_spec.models.draft_kind import TYPES, check_kind
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.mtp import check_nextn
from tllm_spec.models.registry import model_config
from tllm_spec.models.token_map import DraftTokens, read_token_map
from tllm_spec.text.tokenizer import Tokenizer, has_vocabulary, load_tokenizer
from tllm_spec.text.vocabulary import have_same_ids, shared_tokens
from tllm_spec.zoo.registry import resolve_file

logger = logging.getLogger(__name__)


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
    _check_kind(draft, folder)
    if draft.is_head:
        ids = _ids_of_head(draft, folder, target)
        return None if ids is None else DraftTokens(ids, ids)
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
    try:
        shared = shared_tokens(tokenizer, other, vocab_size, own_size)
        tokens = DraftTokens.of_shared(shared, vocab_size, ids, mask)
    except ValueError as error:
        raise ValueError(f"speculative_config.speculative_model: {error}") from None
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
    try:
        return load_tokenizer(str(folder))
    except ValueError as error:
        raise ValueError(f"speculative_config.speculative_model: {error}") from None


def _check_kind(draft: DraftPlan, folder: Path) -> None:
    kind = head_kind(folder)
    check_kind(str(draft.path), kind, read_config(folder), draft.kinds)
    if kind is not None and kind != draft.kinds[0]:
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
    size = own.output_size if draft.token_map else None
    if size in (None, target.vocab_size):
        return []
    return [
        f"speculative_config.speculative_token_map = {draft.token_map!r} is refused: the {kind} "
        f"head has a vocabulary of its own, {size} tokens that its d2t maps to the target's; "
        "accepted: null"
    ]


def _mapped_ids(draft: DraftPlan, vocab_size: int) -> torch.Tensor | None:
    """`[V_draft]`: the ids of the mode's token map, below `vocab_size`; None: it has none. Raises
    ValueError with the option's name for a file that is no token map."""
    if draft.token_map is None:
        return None
    try:
        return read_token_map(resolve_file(draft.token_map), vocab_size)
    except ValueError as error:
        raise ValueError(f"speculative_config.speculative_token_map: {error}") from None
