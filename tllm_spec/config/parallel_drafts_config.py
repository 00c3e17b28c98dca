"""Decoding types whose draft model makes all drafts of a round in one forward, from mask tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, model_validator

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

    @model_validator(mode="after")
    def _check_path(self) -> PARDDecodingConfig:
        if self.sa_config is not None and not self.draft_target_one_model:
            raise ValueError(
                "sa_config is refused with draft_target_one_model = False: drafts are chosen in "
                "the target's round, after the draft model has made its own; accepted: None, or "
                "draft_target_one_model: true"
            )
        return self

    @property
    def may_pause(self) -> bool:
        return not self.draft_target_one_model
