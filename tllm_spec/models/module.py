"""The base of every layer: how parameters are created, which checkpoint tensors fill them, and
attribute lookups without overhead."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.distributed.mapping import Mapping
from tllm_spec.kernels.scaled_linear import BLOCK, dequantised
from tllm_spec.models.fp8_formats import Granularity


@dataclass(frozen=True)
class Placement:
    """How and where parameters are created."""

    dtype: torch.dtype
    device: torch.device
    mapping: Mapping
    batch_invariant: bool = False
    """Whether a row's result must have the same bits for any number of other rows."""
    communicator: Communicator = SINGLE
    fp8: Granularity | None = None
    """What shares a scale in the checkpoint's FP8 weights, which `matrix` keeps; None: it makes
    weights of `dtype`."""

    @property
    def wide(self) -> "Placement":
        """For weights that checkpoints do not have in FP8."""
        return replace(self, fp8=None)

    def of_inputs(self, size: int, full: int) -> "Placement":
        """For weights with a rank's `size` of `full` inputs. If they do not end with a block whose
        weights share a scale, this would belong to two ranks, so the weights are not FP8. The scale
        of a tensor or row belongs to all ranks."""
        is_cut = self.fp8 == "block" and size < full and size % BLOCK > 0
        return self.wide if is_cut else self

    def matrix(
        self, *shape: int, column_major: bool = False
    ) -> tuple[nn.Parameter, nn.Parameter | None]:
        """The weight of a linear layer or of experts, `[..., N, K]`, and if it is FP8 its scales,
        `[..., N, ceil(K / 128)]` (scaled_linear.py)."""
        if self.fp8 is None:
            return self.parameter(*shape, column_major=column_major), None
        weight = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device)
        sizes = *shape[:-1], -(-shape[-1] // BLOCK)
        scales = torch.empty(sizes, dtype=torch.float32, device=self.device)
        return nn.Parameter(weight, requires_grad=False), nn.Parameter(scales, requires_grad=False)

    def parameter(self, *shape: int, column_major: bool = False) -> nn.Parameter:
        """Uninitialised: loading fills it. `column_major` changes the strides, not the shape."""
        if column_major:
            values = torch.empty(shape[::-1], dtype=self.dtype, device=self.device).t()
        else:
            values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)


@dataclass(frozen=True)
class Fp8Tensor:
    """A checkpoint's weight `[N, K]` in FP8, with its scales `[N, ceil(K / 128)]`."""

    weight: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape


@dataclass(frozen=True)
class WeightSlot:
    """Where a checkpoint tensor goes: a view of a parameter, and the slice of the tensor that it
    takes."""

    destination: torch.Tensor | None
    """None: only other ranks need the tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    shard_dim: int | None = None
    start: int = 0
    order: torch.Tensor | None = None
    """int64, on the host: the tensor's rows in the order of the parameter's; None: the same."""
    scales: torch.Tensor | None = None
    """Where the scales of an FP8 tensor go; None: the tensor is dequantised."""

    def load(self, tensor: torch.Tensor | Fp8Tensor) -> None:
        """Copy this rank's slice of `tensor`, converted to the parameter's dtype and device."""
        if self.destination is None:
            return
        if isinstance(tensor, torch.Tensor):
            assert self.scales is None  # `widen` has been called
            self.destination.copy_(self._own(tensor))
        elif self.scales is None:
            wide = dequantised(tensor.weight, tensor.scales, self.destination.dtype)
            self.destination.copy_(self._own(wide))
        else:
            self.destination.copy_(self._own(tensor.weight))
            self.scales.copy_(self._own(tensor.scales, BLOCK))

    def _own(self, tensor: torch.Tensor, inputs: int = 1) -> torch.Tensor:
        """This rank's slice. `inputs`: that share a column. Where columns of scales lie in two
        slices, all scales of a row are equal (`Placement.of_inputs`)."""
        assert self.destination is not None
        if self.shard_dim is not None:
            per_column = inputs if self.shard_dim == 1 else 1
            size = -(-self.destination.shape[self.shard_dim] // per_column)
            tensor = tensor.narrow(self.shard_dim, self.start // per_column, size)
        return tensor if self.order is None else tensor.index_select(0, self.order)


class Module(nn.Module):
    """`nn.Module` with plain attribute lookups for parameters and submodules.

    On a CPU the ops of a small layer have 60 µs of overhead, and the lookups and `__call__` of
    `nn.Module` would add 15. So attributes are also kept in the instance's dictionary, and layers
    call each other's `forward`, which is typed."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__[name] = value

    def add_under(self, name: str, attribute: str, module: nn.Module | None) -> None:
        """Add a submodule under its checkpoint's name, with another attribute for the code."""
        setattr(self, name, module)
        self.__dict__[attribute] = module

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        """The checkpoint names of the module's own parameters, with their slots; `path` is the
        module's name."""
        for name, parameter in self.named_parameters(recurse=False):
            yield f"{path}.{name}", WeightSlot(parameter, tuple(parameter.shape))

    def widen(self, placement: Placement) -> None:
        """Called before loading where the checkpoint's weights are not in FP8: makes them of the
        placement's dtype. Most modules have none that could be."""

    def specialize_for_cpu(self) -> None:
        """Called after loading for float32 on a CPU: derives faster forms of the weights."""


def specialize_for_cpu(model: nn.Module, placement: Placement) -> None:
    """Let the layers of a loaded model derive faster forms of their weights, for float32 on a
    CPU."""
    if placement.device.type == "cpu" and placement.dtype == torch.float32:
        for module in model.modules():
            if isinstance(module, Module):
                module.specialize_for_cpu()


def sibling(path: str, name: str) -> str:
    """The path of the module `name` next to `path`: the checkpoint's name of a fused part."""
    return path[: path.rfind(".") + 1] + name
