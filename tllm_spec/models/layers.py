"""The base of every layer: how parameters are created, which checkpoint tensors fill them, and
attribute lookups without overhead; embedding and norms."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from tllm_spec.distributed.communicator import SINGLE, Communicator, Mapping
from tllm_spec.kernels.attention.rotary_write import HeadWeights
from tllm_spec.kernels.gemm.batch_invariant_linear import batch_invariant_linear
from tllm_spec.kernels.gemm.norms import NormWeight, add_norm, rms_norm
from tllm_spec.kernels.slots.row_copies import gather_rows, gather_slice_rows
from tllm_spec.models.formats.quantisation import BLOCK, PLAIN, Quantisation


@dataclass(frozen=True)
class Placement:
    """How and where parameters are created."""

    dtype: torch.dtype
    device: torch.device
    mapping: Mapping
    batch_invariant: bool = False
    """Whether a row's result must have the same bits for any number of other rows."""
    communicator: Communicator = SINGLE
    quantised: Quantisation = PLAIN
    """How the weights are quantised that stay so."""
    input_slices: int = 1
    """Ranks that have a slice of a layer's inputs each."""
    staged: bool = False
    """Whether the tensors lie in host memory, in the form that they have on the device."""

    @property
    def memory(self) -> torch.device:
        """Where tensors are created."""
        return torch.device("cpu") if self.staged else self.device

    @property
    def wide(self) -> "Placement":
        """The placement of weights that checkpoints do not quantise."""
        return replace(self, quantised=PLAIN)

    def of_inputs(self, size: int, full: int) -> "Placement":
        """The placement of weights with a rank's `size` of `full` inputs. If they do not end with a
        block whose weights share a scale, this block would belong to two ranks, so the weights are
        not FP8, or if activations have blocks as well, the layer refuses. The scale of a tensor or
        row belongs to all ranks."""
        form = self.quantised
        in_blocks = form.activations is not None and form.activations.shared_by == "block"
        is_cut = form.fp8 == "block" and size < full and size % BLOCK > 0 and not in_blocks
        return replace(self.wide if is_cut else self, input_slices=full // size)

    def parameter(self, *shape: int, column_major: bool = False) -> nn.Parameter:
        """Uninitialised: loading fills it. `column_major` changes the strides, not the shape."""
        if column_major:
            values = torch.empty(shape[::-1], dtype=self.dtype, device=self.memory).t()
        else:
            values = torch.empty(shape, dtype=self.dtype, device=self.memory)
        return nn.Parameter(values, requires_grad=False)


def tp_sizes(inputs: int, group: int) -> str:
    """The tensor parallel sizes with whole groups of a row-parallel layer's inputs, for errors."""
    number, rest = divmod(inputs, group)
    sizes = [size for size in range(1, number + 1) if not rest and number % size == 0] or [1]
    return f"{', '.join(map(str, sizes))} devices"


class StoredWeight(Protocol):
    """A quantised weight `[N, K]` of a checkpoint, with what belongs to it."""

    @property
    def shape(self) -> torch.Size: ...

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """`[N, K]`."""


@dataclass(frozen=True)
class WeightSlot:
    """Where a checkpoint tensor goes: a view of a parameter, and the slice of the tensor that it
    takes."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (
        torch.bfloat16, torch.float16, torch.float32, torch.float64,
    )  # fmt: skip
    """In which the checkpoint may have the tensor, unless it is a `StoredWeight`."""
    is_quantised: ClassVar[bool] = False
    """Whether the parameter keeps a `StoredWeight` as it is."""
    destination: torch.Tensor | None
    """None: only other ranks need the tensor."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    shard_dim: int | None = None
    start: int = 0
    order: torch.Tensor | None = None
    """int64, on the host: the tensor's rows in the order of the parameter's; None: the same."""
    adds_one: bool = field(default=False, kw_only=True)
    """Whether the checkpoint has the differences of a norm's weights from 1."""
    factor: float = field(default=1.0, kw_only=True)
    """What multiplies the checkpoint's values for a parameter of float32."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Those that the whole tensor may have."""
        return (self.shape,)

    def load(self, tensor: torch.Tensor | StoredWeight) -> None:
        """Copy this rank's slice of `tensor`, converted to the parameter's dtype and device."""
        if self.destination is None:
            return
        if not isinstance(tensor, torch.Tensor):
            tensor = tensor.dequantised(self.destination.dtype)
        if self.adds_one or self.factor != 1:
            tensor = (tensor.float() + self.adds_one) * self.factor
        self.destination.copy_(self.own(tensor))

    def own(self, tensor: torch.Tensor, inputs: int = 1) -> torch.Tensor:
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
        prefix = f"{path}." if path else ""
        for name, parameter in self.named_parameters(recurse=False):
            yield f"{prefix}{name}", WeightSlot(parameter, tuple(parameter.shape))

    def widen(self, placement: Placement) -> None:
        """Called before loading where the checkpoint's weights are not quantised: makes them of the
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


class Embedding(Module):
    """Token ids to rows. Vocabulary-parallel: each rank has a slice of the rows, and a lookup sums
    over the ranks, exactly, since all ranks but one add 0.

    Raises ValueError if the rows cannot be split evenly over the ranks."""

    def __init__(self, num_embeddings: int, size: int, placement: Placement) -> None:
        super().__init__()
        mapping = placement.mapping
        local = mapping.shard(num_embeddings, "vocab_size")
        self.num_embeddings, self.first = num_embeddings, local * mapping.tp_rank
        self.is_sharded = mapping.tp_size > 1
        self.communicator = placement.communicator
        self.weight = placement.parameter(local, size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`[T]` to `[T, H]`."""
        if not self.is_sharded:
            return gather_rows(self.weight, input_ids)
        rows = gather_slice_rows(self.weight, input_ids, self.first)
        self.communicator.all_reduce(rows)
        return rows

    def lookup(self, input_ids: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Ids and table for `draft_input`, which gathers rows itself where this rank has all."""
        return (None, self.forward(input_ids)) if self.is_sharded else (input_ids, self.weight)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        shape = (self.num_embeddings, self.weight.shape[1])
        yield f"{path}.weight", WeightSlot(self.weight, shape, 0, self.first)


class RMSNorm(Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (arXiv 1910.07467). is_offset:
    the checkpoint has the weight's difference from 1."""

    def __init__(
        self, size: int, eps: float, placement: Placement, *, is_offset: bool = False
    ) -> None:
        super().__init__()
        self.weight = (in_float32(placement) if is_offset else placement).parameter(size)
        self.size, self.eps, self.is_offset = size, eps, is_offset
        self.kernel_weight = NormWeight(self.weight, eps)
        self.scaled_weight: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scaled_weight is None:
            return rms_norm(x, self.weight, self.eps)
        root = torch.linalg.vector_norm(x, 2, -1, True).hypot_(self.root_eps)
        return torch.mul(x, self.scaled_weight).div_(root)

    def add_to(
        self,
        total: torch.Tensor,
        x: torch.Tensor,
        *,
        factor: torch.Tensor | None = None,
        then: "RMSNorm | None" = None,
    ) -> torch.Tensor:
        """Add the norm of x `[T, H]` to `total` `[T, H]`, in place, and multiply by `factor` `[1]`.
        Returns the norm `then` of that, or without it `total`."""
        if self.scaled_weight is None:
            after = None if then is None else then.kernel_weight
            return add_norm(total, x, self.kernel_weight, factor=factor, then=after)
        total.add_(self.forward(x))
        if factor is not None:
            total.mul_(factor)
        return total if then is None else then.forward(total)

    def specialize_for_cpu(self) -> None:
        """On a CPU F.rms_norm is eight ops. These four take half the time; with n = size:
        `x * (weight * sqrt(n)) / hypot(|x|, sqrt(n * eps))`."""
        self.scaled_weight = self.weight * self.size**0.5
        self.root_eps = torch.tensor((self.size * self.eps) ** 0.5)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        yield f"{path}.weight", WeightSlot(self.weight, (self.size,), adds_one=self.is_offset)


def in_float32(placement: Placement) -> Placement:
    """The placement of norms' weights that are stored as differences from 1: in 16 bits the sum
    would lose half of their digits."""
    return replace(placement, dtype=torch.float32)


class HeadNorm(Module):
    """RMSNorm over each head of q and k, applied by the attention backend. The weights of q's heads
    are followed by those of k's. `order`: `[D]` int64, the checkpoint's element for each one; None:
    the same."""

    norms_values = False

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        placement: Placement,
        *,
        is_offset: bool = False,
        order: torch.Tensor | None = None,
        kv_copies: int = 1,
    ) -> None:
        """kv_copies: ranks that have the same heads of k."""
        super().__init__()
        placement = in_float32(placement) if is_offset else placement
        self.num_heads, self.is_offset, self.order = num_heads, is_offset, order
        self.weight = placement.parameter(num_heads + num_kv_heads, head_dim)
        self.head_weights = HeadWeights(self.weight, eps, self.norms_values)
        self.mapping, self.communicator = placement.mapping, placement.communicator
        self.copies = (1, kv_copies)

    def normed(self, heads: torch.Tensor) -> tuple[torch.Tensor, HeadWeights | None]:
        """Heads of q, k and v, `[T, Hq + 2 * Hkv, D]`, and what the attention backend does."""
        return heads, self.head_weights

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        """One `[D]` tensor of the checkpoint fills the rows of all heads of q, another those of
        k."""
        parts = self.weight[: self.num_heads], self.weight[self.num_heads :]
        for name, own in zip(("q_norm", "k_norm"), parts, strict=True):
            if not len(own):  # the keys are another layer's
                continue
            shape, module = (own.shape[-1],), sibling(path, name)
            slot = WeightSlot(own, shape, order=self.order, adds_one=self.is_offset)
            yield f"{module}.weight", slot


class AllHeadsNorm(HeadNorm):
    """RMSNorm over all heads of q together, and over all of k, also those of other ranks. The
    checkpoint has a weight for each element."""

    def normed(self, heads: torch.Tensor) -> tuple[torch.Tensor, None]:
        number, (q, kv) = self.mapping.tp_size, (self.num_heads, len(self.weight) - self.num_heads)
        parts, eps = (heads[:, :q], heads[:, q : q + kv]), self.head_weights.eps
        if number == 1:
            for part, weight in zip(parts, self.weight.split_with_sizes((q, kv)), strict=True):
                part.copy_(rms_norm(part.flatten(1), weight.flatten(), eps).view_as(part))
            return heads, None
        squares = torch.cat([self._mean_square(part) for part in parts], 1)
        self.communicator.all_reduce(squares)
        roots = (squares / number + eps).rsqrt()
        weights = self.weight.float().split_with_sizes((q, kv))
        for part, weight, root in zip(parts, weights, roots.unbind(1), strict=True):
            part.copy_(part.float() * root[:, None, None] * weight)
        return heads, None

    def _mean_square(self, part: torch.Tensor) -> torch.Tensor:
        """`[T, 1]` float32, the same bits in every batch."""
        rows = part.float().flatten(1)
        return (
            batch_invariant_linear(rows.square(), rows.new_ones(1, rows.shape[1])) / rows.shape[1]
        )

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        parts = self.weight[: self.num_heads], self.weight[self.num_heads :]
        for name, own, copies in zip(("q_norm", "k_norm"), parts, self.copies, strict=True):
            size, rank = own.numel(), self.mapping.tp_rank // copies
            full, order = size * self.mapping.tp_size // copies, None
            if self.order is not None:
                order = torch.arange(size).view_as(own)[:, self.order].flatten()
            slot = WeightSlot(own.view(-1), (full,), 0, size * rank, order)
            yield f"{sibling(path, name)}.weight", slot
