"""How a KV pool stores numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tllm_spec.kernels.attention.kv_codes import CODES, UNSCALED, KVScales


@dataclass(frozen=True)
class KVFormat:
    """Keys, values or latents of a model that computes in `dtype`."""

    dtype: torch.dtype
    scales: tuple[KVScales, ...] | None = None
    """One for each of the pool's layers: the pool has FP8 codes. None: it has numbers of type
    `dtype`."""

    @property
    def stored(self) -> torch.dtype:
        """The type of what is in the pool."""
        return self.dtype if self.scales is None else CODES

    def scales_of(self, layer: int) -> KVScales:
        return UNSCALED if self.scales is None else self.scales[layer]

    def of_layers(self, layers: Sequence[int]) -> "KVFormat":
        """The format of a pool that has some of the layers."""
        if self.scales is None:
            return self
        return KVFormat(self.dtype, tuple(self.scales[layer] for layer in layers))
