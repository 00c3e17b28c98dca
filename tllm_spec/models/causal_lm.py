"""The interface between the engine and a model: tokens to hidden states, hidden states of chosen
rows to logits."""

from abc import ABC, abstractmethod

import torch

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.linear import OutputLinear
from tllm_spec.models.module import Module, Placement
from tllm_spec.models.tied_output import OUTPUT
from tllm_spec.models.token_map import DraftTokens, reduced_output


class CausalLM(Module, ABC):
    """The base of every architecture. Parameters have no gradient; the caller sets
    `torch.inference_mode()`."""

    config: ModelConfig
    lm_head: OutputLinear
    draft_to_target: torch.Tensor | None = None
    """`[V_draft]` int64: of a draft model, the target's ids of its logits; None: they are equal."""
    read_as: torch.Tensor | None = None
    """`[V + 1]` int64: of a draft model, its own ids of the target's and of its mask token; None:
    they are equal."""

    @property
    def num_logits(self) -> int:
        """Logits of one row, on all ranks together."""
        ids = self.draft_to_target
        return self.config.vocab_size if ids is None else len(ids)

    def keep_tokens(self, tokens: DraftTokens, placement: Placement) -> None:
        """Limits the logits to those of `tokens`."""
        self.lm_head = reduced_output(self.lm_head, tokens.rows, placement)
        self.draft_to_target = tokens.ids.to(self.device)
        if tokens.read_as is not None:
            self.read_as = tokens.read_as.to(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters and activations."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Tokens `[T]` at positions `[T]` to hidden states after the final norm, `[T, H]`, or `[R,
        H]` of the rows that the context wants."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, H]` to `[R, vocab_size]`, in the model's dtype; the sampler converts to float32.
        Where the output layer is sharded, to this rank's columns, `lm_head.shard`."""

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may have the tensor `name` although no parameter takes it: here the
        tensors of images, and the rotary frequencies and a copy of a tied output layer, which old
        checkpoints store."""
        is_tied, part = self.config.tie_word_embeddings, self.config.text_part
        is_tied_output = is_tied and part.parameter_name(name) == OUTPUT
        is_unused = part.is_of_images(name) or name.endswith("rotary_emb.inv_freq")
        return is_tied_output or is_unused
