"""How a KV pool stores numbers."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVFormat:
    """Keys, values or latents of type `dtype`, without scales."""

    dtype: torch.dtype
