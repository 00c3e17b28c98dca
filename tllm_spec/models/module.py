"""What every layer is built from: how parameters are made, what fills them, lookups without
overhead."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tllm_spec.distributed.mapping import Mapping


@dataclass(frozen=True)
class Placement:
    """How and where parameters are made."""

    dtype: torch.dtype
    device: torch.device
    mapping: Mapping
    batch_invariant: bool = False
    """Whether a linear layer's row must not depend, in any bit, on how many others there are."""

    def parameter(self, *shape: int, column_major: bool = False) -> nn.Parameter:
        """Uninitialised: loading fills it. `column_major` is a matter of strides, the shape is the
        same."""
        if column_major:
            values = torch.empty(shape[::-1], dtype=self.dtype, device=self.device).t()
        else:
            values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)


@dataclass(frozen=True)
class WeightSlot:
    """Where a checkpoint tensor goes: a view of a parameter, and which run of the tensor it
    takes."""

    destination: torch.Tensor | None
    """None: another rank needs the tensor, this one does not."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    shard_dim: int | None = None
    start: int = 0

    def load(self, tensor: torch.Tensor) -> None:
        """Copy this rank's share of `tensor`; dtype and device are converted on the way."""
        if self.destination is None:
            return
        if self.shard_dim is not None:
            tensor = tensor.narrow(
                self.shard_dim, self.start, self.destination.shape[self.shard_dim]
            )
        self.destination.copy_(tensor)


class Module(nn.Module):
    """`nn.Module` whose parameters and submodules are found as fast as any attribute.

    On a CPU the ops of a small layer take 60 µs before they compute anything, to which the lookups
    and calls of `nn.Module` would add 15. So attributes are also kept where Python looks first, and
    layers call each other's `forward`, which is typed, too."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__[name] = value

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        """The checkpoint's names for the module's own parameters, with their places; `path` is its
        name."""
        for name, parameter in self.named_parameters(recurse=False):
            yield f"{path}.{name}", WeightSlot(parameter, tuple(parameter.shape))

    def specialize_for_cpu(self) -> None:
        """Called once the weights are in, for float32 on a CPU: derive from them what is faster
        there."""


def sibling(path: str, name: str) -> str:
    """The module `name` beside the module `path`: where the checkpoint has a part of a fused
    parameter."""
    return path[: path.rfind(".") + 1] + name
