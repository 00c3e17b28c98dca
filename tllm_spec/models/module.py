"""What every layer is built from: a module without call overhead, how its parameters are made, what fills them."""

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
    mapping: Mapping = Mapping()

    def parameter(self, *shape: int) -> nn.Parameter:
        """Uninitialised: loading fills it."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


@dataclass(frozen=True)
class WeightSlot:
    """Where one checkpoint tensor goes: a view of a parameter, and which rows or columns of the tensor it takes."""

    destination: torch.Tensor
    shape: tuple[int, ...]
    shard_dim: int | None = None
    start: int = 0

    def load(self, tensor: torch.Tensor) -> None:
        """Copy this rank's share of `tensor`, which has `shape`; dtype and device are converted on the way."""
        if self.shard_dim is not None:
            tensor = tensor.narrow(self.shard_dim, self.start, self.destination.shape[self.shard_dim])
        self.destination.copy_(tensor)


class Module(nn.Module):
    """`nn.Module` whose parameters and submodules are found as fast as any attribute.

    A layer of a small model takes 90 µs on a CPU, to which `nn.Module.__getattr__` and its call machinery would add 15. So
    attributes are also kept where Python looks first, and layers call each other's `forward` (which is typed, too).
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__[name] = value

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        """The checkpoint's names for the module's own parameters, with their places; `path` is the module's name."""
        for name, parameter in self.named_parameters(recurse=False):
            yield f"{path}.{name}", WeightSlot(parameter, tuple(parameter.shape))


def sibling(path: str, name: str) -> str:
    """The module `name` beside the module `path`: where the checkpoint has a part of a fused parameter."""
    return path[: path.rfind(".") + 1] + name
