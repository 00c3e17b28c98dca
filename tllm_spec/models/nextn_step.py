"""What next-token-prediction modules (MTP) of all architectures have in common: one step."""

from abc import ABC, abstractmethod

import torch

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.drafts.draft_input import DraftInputNorms, draft_input
from tllm_spec.models.layers import RMSNorm
from tllm_spec.models.linear import Linear
from tllm_spec.models.llama import DecoderLayer, LlamaForCausalLM


class NextnStep(ABC):
    """A decoder layer whose input is projected from the normed embedding and the normed hidden
    state."""

    target: LlamaForCausalLM
    norms: DraftInputNorms
    eh_proj: Linear

    @staticmethod
    @abstractmethod
    def prefix(number: int) -> str:
        """What the names of the checkpoint's tensors begin with; number: of the module, counted
        from the decoder's first layer."""

    @property
    @abstractmethod
    def layer(self) -> DecoderLayer: ...

    @property
    @abstractmethod
    def last_norm(self) -> RMSNorm: ...

    def predict(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        context: ForwardContext,
        looked_up: tuple[torch.Tensor | None, torch.Tensor],
    ) -> torch.Tensor:
        """One step. `hidden` is not changed.

        Args:
            input_ids: `[T]`; the token after the one that the row's hidden state was computed from.
            positions: `[T]`.
            hidden: `[T, H]`, the target's after its final norm, or the result of the step before.
            context: of the module's own KV pool.
            looked_up: what `Embedding.lookup` gives for the ids.

        Returns:
            `[T, H]`, or `[R, H]` of the rows that the context wants, after the module's final norm:
            for `compute_logits` and for the next step.
        """
        rotary = Rotary(self.target.model.cos_sin, positions)
        given = draft_input(*looked_up, hidden, self.norms, rotary, input_ids[:0])
        total = self.eh_proj.forward(given.both)
        total = self.layer.forward(total, rotary, context, context.wanted)
        return self.last_norm.forward(total) if len(total) else total
