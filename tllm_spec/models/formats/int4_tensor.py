"""A checkpoint's weight of 4 bits, and what can become one."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from tllm_spec.kernels.gemm.int4_weights import int4_dequantised


@dataclass(frozen=True)
class Int4Tensor:
    """A checkpoint's weight `[N, K]`: codes of 0 to 15, with the groups' words `[N, G]`."""

    codes: torch.Tensor
    words: torch.Tensor
    group: int
    """Inputs that share a scale; 0: all of a row."""
    order: torch.Tensor | None = None
    """`[K]` int64: the input of each column of the codes; None: its own."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        values = int4_dequantised(self.codes, self.words, self.group or self.shape[1], dtype)
        return values if self.order is None else in_given_order(values, self.order)


def in_given_order(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Columns of `values` `[N, K]`, which are those of the inputs `order` `[K]`, where they
    belong."""
    return torch.empty_like(values).index_copy_(1, order, values)


@runtime_checkable
class Int4Source(Protocol):
    """A stored weight that is read when its layer asks for it."""

    def as_int4(self) -> Int4Tensor: ...
