"""Checks of a draft model, an EAGLE-3 head or MTP modules before anything is loaded."""

from typing import Any

from tllm_spec.executor.speculative.drafting.loaded_draft import draft_folder
from tllm_spec.executor.speculative.modes import DraftModel
from tllm_spec.models.config import ModelConfig, read_json
from tllm_spec.models.mtp import check_nextn
from tllm_spec.models.nextn_checkpoint import is_exported
from tllm_spec.tokenizer import Tokenizer, check_same_vocabulary, load_tokenizer

# Keys of config.json that only EAGLE-3 heads have.
HEAD_KEYS = frozenset({"draft_vocab_size", "eagle_config", "speculators_model_type"})


def check_draft(draft: DraftModel | None, tokenizer: Tokenizer | None, target: ModelConfig) -> None:
    """Raises ValueError, naming the option, when the folder has a head instead of a model or a
    model instead of a head, when a model's tokenizer is not the target's, and when there is no
    MTP module to draft with."""
    if draft is None:
        return
    if draft.num_modules:
        exported = None if draft.path is None else draft_folder(draft)
        check_nextn(target, draft.num_modules, exported)
        return
    folder = draft_folder(draft)
    option = f"speculative_config.speculative_model = {draft.path!r}"
    config = read_json(folder / "config.json")
    if is_exported(config):
        raise ValueError(f"{option} has MTP modules; use it with decoding_type: MTP")
    if draft.is_head and not _may_be_head(config):
        raise ValueError(
            f"{option} is a language model of {config['num_hidden_layers']} layers, not an EAGLE-3 "
            "head; use it with decoding_type: Draft_Target"
        )
    if not draft.is_head and _is_head(config):
        raise ValueError(
            f"{option} is an EAGLE-3 head, which reads hidden states of the target; use it with "
            "decoding_type: Eagle3"
        )
    if tokenizer is not None and not draft.is_head:
        check_same_vocabulary(tokenizer, load_tokenizer(str(folder)))


def _is_head(config: dict[str, Any]) -> bool:
    names = config.get("architectures") or []
    return bool(HEAD_KEYS & config.keys()) or any("eagle" in str(name).lower() for name in names)


def _may_be_head(config: dict[str, Any]) -> bool:
    """Some published heads have no more than a Llama's configuration of one layer."""
    return _is_head(config) or config.get("num_hidden_layers", 1) == 1
