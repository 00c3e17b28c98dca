"""Decoding types whose draft network makes all drafts of a round in one forward, from mask
tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import NonNegativeInt, Strict

from tllm_spec.config.draft_tree_config import DraftTreeDecodingConfig
from tllm_spec.config.speculative_base import DraftModelDecodingConfig


class PARDDecodingConfig(DraftTreeDecodingConfig, DraftModelDecodingConfig):
    """Drafts from a smaller model with the target's tokenizer that was tuned to answer at mask
    tokens (PARD). The names are TensorRT-LLM's."""

    decoding_type: Literal["PARD"] = "PARD"
    """A smaller model that was tuned to draft all tokens in one forward."""
    draft_target_one_model: bool = True
    """True runs the draft model inside the target's forward: a round is one CUDA graph. False runs
    it in its own engine before the forward. Rounds overlap either way."""
    mask_token_id: NonNegativeInt | None = None
    """The token that stands for drafts. null: `mask_token_id` or `pard_token` in the draft model's
    `config.json`."""

    @property
    def may_pause(self) -> bool:
        return not self.draft_target_one_model


class DFlashDecodingConfig(DraftTreeDecodingConfig, DraftModelDecodingConfig):
    """Drafts from a DFlash head, whose layers attend to keys and values of the target's hidden
    states and fill in a block of mask tokens. The names are TensorRT-LLM's."""

    decoding_type: Literal["DFlash"] = "DFlash"
    """A head that fills in a block of mask tokens after the newest one."""
    mask_token_id: NonNegativeInt | None = None
    """The token that stands for drafts. null: what the head's `config.json` says."""
    target_layer_ids: Annotated[tuple[NonNegativeInt, ...], Strict(False)] | None = None
    """Target layers, counted from 0, whose outputs the head reads. null: what the head's
    `config.json` says."""

    @property
    def may_pause(self) -> bool:
        return False
