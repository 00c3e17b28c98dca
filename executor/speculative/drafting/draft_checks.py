"""Checks of a draft model, a head or MTP modules before anything is loaded."""

import logging
from pathlib import Path

from tllm_spec.executor.speculative.drafting.loaded_draft import (
    dflash_config,
    draft_folder,
    kind_of_head,
    mask_token,
    token_ids,
)
from tllm_spec.executor.speculative.modes import DraftPlan
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.config_file import read_config
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.head_checkpoint import HeadKind, head_kind
from tllm_spec.models.mtp import check_nextn
from tllm_spec.models.nextn_checkpoint import is_exported
from tllm_spec.text.tokenizer import (
    Tokenizer,
    check_same_vocabulary,
    has_vocabulary,
    load_tokenizer,
)

logger = logging.getLogger(__name__)

_TYPES: dict[HeadKind, str] = {"EAGLE-1/2": "Eagle", "EAGLE-3": "Eagle3", "DFlash": "DFlash"}


def check_draft(draft: DraftPlan | None, tokenizer: Tokenizer | None, target: ModelConfig) -> None:
    """Raises ValueError, naming the option, when the folder has a head instead of a model, a model
    instead of a head or another kind of head, when a model's tokenizer is not the target's, when
    there is no MTP module to draft with, and for options that the head or model does not have."""
    if draft is None:
        return
    if draft.num_modules:
        exported = None if draft.path is None else draft_folder(draft)
        check_nextn(target, draft.num_modules, exported)
        return
    folder = draft_folder(draft)
    _check_kind(draft, folder)
    if draft.is_head:
        reasons = _head_mistakes(draft, folder, target)
    else:
        if tokenizer is not None:
            _check_tokenizer(folder, tokenizer)
        mask_token(draft)
        own = ModelConfig.from_pretrained(folder)
        reasons = _map_mistakes(draft, min(target.vocab_size, own.vocab_size))
        if own.delta is not None:
            reasons.append(
                f"speculative_config.speculative_model = {draft.path!r} is a {own.architecture}, "
                "which is served as a target only: a draft model's layers need keys and values"
            )
    if reasons:
        raise ValueError("\n".join(reasons))


def _check_tokenizer(folder: Path, target: Tokenizer) -> None:
    if not has_vocabulary(folder):
        logger.warning("%s has no tokenizer; its token ids are taken to be the target's", folder)
        return
    try:
        check_same_vocabulary(target, load_tokenizer(str(folder)))
    except ValueError as error:
        raise ValueError(f"speculative_config.speculative_model: {error}") from None


def _check_kind(draft: DraftPlan, folder: Path) -> None:
    option = f"speculative_config.speculative_model = {draft.path!r}"
    if is_exported(read_config(folder)):
        raise ValueError(f"{option} has MTP modules; use it with decoding_type: MTP")
    kind = head_kind(folder)
    if kind is None:
        # Some published heads have no more than a Llama's configuration of one layer.
        num_layers = read_config(folder).get("num_hidden_layers", 1)
        if draft.is_head and num_layers != 1:
            raise ValueError(
                f"{option} is a language model of {num_layers} layers, not an "
                f"{draft.head_kinds[0]} head; use it with decoding_type: Draft_Target"
            )
    elif kind not in draft.head_kinds:
        raise ValueError(
            f"{option} is an {kind} head, which reads hidden states of the target; use it with "
            f"decoding_type: {_TYPES[kind]}"
        )
    elif kind != draft.head_kinds[0]:
        logger.warning(
            "decoding_type = %r is served as %s: the folder has an %s head",
            _TYPES[draft.head_kinds[0]],
            _TYPES[kind],
            kind,
        )


def _head_mistakes(draft: DraftPlan, folder: Path, target: ModelConfig) -> list[str]:
    if (kind := kind_of_head(draft, folder)) != "EAGLE-1/2":
        is_dflash = kind == "DFlash"
        own: Eagle3Config = (
            dflash_config(draft, folder) if is_dflash else Eagle3Config.from_pretrained(folder)
        )
        size = own.output_size if draft.token_map else None
        if size in (None, target.vocab_size):
            return _map_mistakes(draft, target.vocab_size)
        return [
            f"speculative_config.speculative_token_map = {draft.token_map!r} is refused: the "
            f"{kind} head has a vocabulary of its own, {size} tokens that its d2t maps to the "
            "target's; accepted: null"
        ]
    found = _map_mistakes(draft, target.vocab_size)
    if draft.capture_layers is not None:
        found.append(
            f"eagle3_layers_to_capture = {list(draft.capture_layers)} is refused: an EAGLE-1/2 "
            "head reads the target's last hidden state only; accepted: null"
        )
    return found


def _map_mistakes(draft: DraftPlan, vocab_size: int) -> list[str]:
    try:
        token_ids(draft, vocab_size)
    except ValueError as error:
        return [str(error)]
    return []
