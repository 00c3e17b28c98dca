"""What the engine asks of a model: tokens in, hidden states out, logits for the rows that it
chooses."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

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
        """`[T]` tokens at `[T]` positions to `[T, H]` hidden states after the final norm; `[R, H]`
        where the context wants only some rows."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, H]` to `[R, vocab_size]`, in the model's dtype: who computes with them makes them
        float32."""


def layers_of(model: CausalLM) -> nn.ModuleList:
    """The decoder's blocks."""
    layers = model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    return layers


@contextmanager
def first_layers(model: CausalLM, number: int) -> Iterator[None]:
    """Inside, the model has only its first layers: what it computes is not its answer, but takes
    their time."""
    decoder, layers = model.get_submodule("model"), layers_of(model)
    decoder.layers = layers[:number]
    try:
        yield
    finally:
        decoder.layers = layers
