"""What the engine asks of a model: tokens in, hidden states out, logits for the rows that it chooses."""

from abc import ABC, abstractmethod

import torch

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.module import Module


class CausalLM(Module, ABC):
    """Every architecture. Parameters have no gradient; the caller sets `torch.inference_mode()`."""

    config: ModelConfig

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """`[T]` tokens at `[T]` positions to `[T, H]` hidden states after the final norm; `[R, H]` where the context
        wants only some rows."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, H]` to `[R, vocab_size]`, in the model's dtype: who computes with them makes them float32."""
