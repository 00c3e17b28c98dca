"""Draft models and heads whose network runs outside torch, on torch's memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from tllm_spec.models.config import ModelConfig
from tllm_spec.models.draft_head import DraftHead

# TensorRT asks for addresses at multiples of so many bytes. torch allocates at multiples of 512.
ALIGNMENT = 256


class Network(Protocol):
    """A network that `Decoder` or `HeadDecoder` has defined."""

    @property
    def may_be_captured(self) -> bool:
        """Whether a CUDA graph can hold a run."""

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """All tensors are contiguous, on the network's device and at multiples of `ALIGNMENT` in
        their storage; `outputs` have the right shapes and are overwritten. On CUDA the run is in
        order with torch's current stream."""


@dataclass(frozen=True)
class ExternalDraft:
    """A draft model whose network runs outside torch."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    network: Network

    @property
    def num_logits(self) -> int:
        """Logits of one row."""
        return self.config.vocab_size


@dataclass(frozen=True)
class ExternalHead(ExternalDraft):
    """A head whose layers run in the network. `head`: what is left to torch, which is `fuse`."""

    head: DraftHead

    @property
    def num_logits(self) -> int:
        return self.head.num_logits
