"""Linear layers of one tensor-parallel rank, and the checkpoint tensors that they fuse.

Each holds one rank's shard. Row-parallel layers sum over the ranks.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import monotonic
from types import MappingProxyType
from typing import Any

import msgpack
import torch
from torch import nn

from tllm_spec.distributed.communicator import SINGLE, Communicator, VocabShard
from tllm_spec.kernels.disk_cache import cache_folder
from tllm_spec.kernels.gemm.cublas_lt import ALGORITHM_BYTES, DATA_TYPES, CublasLt, shared_library
from tllm_spec.kernels.gemm.fp8_gemms import Fp8Gemms
from tllm_spec.kernels.gemm.tuned_linear import (
    GemmGroup,
    TunedGemms,
    read_table,
    table_path,
    tune_missing,
    write_table,
)
from tllm_spec.models.formats.four_bit import FourBitWeight
from tllm_spec.models.formats.fp8 import QuantisedActivations, ScaledWeight
from tllm_spec.models.formats.weight_format import (
    BatchInvariantWeight,
    CpuWeight,
    CudaWeight,
    Part,
    PlainWeight,
    WeightFormat,
    cpu_copy_bytes,
)
from tllm_spec.models.layers import Module, Placement, RMSNorm, WeightSlot, sibling


def choose_format(
    shape: tuple[int, ...],
    placement: Placement,
    bias: nn.Parameter | None,
    *,
    has_own_inputs: bool = False,
) -> WeightFormat:
    """The format of the placement's weights, with new tensors. shape: outputs and inputs, of
    experts after their number, each of which may have inputs of its own."""
    form = placement.quantised
    if form.activations is not None:
        return QuantisedActivations(shape, placement, bias, has_own_inputs=has_own_inputs)
    if form.four_bit is not None:
        return FourBitWeight(shape, placement, bias)
    if form.fp8 is not None:
        return ScaledWeight(shape, placement, bias)
    if placement.device.type == "cpu" and not placement.batch_invariant and len(shape) == 2:
        return CpuWeight(CpuWeight.allocate(*shape, placement), bias)
    return plain_format(placement.parameter(*shape), placement, bias)


def plain_format(
    weight: nn.Parameter, placement: Placement, bias: nn.Parameter | None
) -> PlainWeight:
    """The format of a given weight of the placement's dtype, row-major."""
    if placement.batch_invariant:
        return BatchInvariantWeight(weight, bias)
    return CudaWeight(weight, bias) if placement.device.type == "cuda" else CpuWeight(weight, bias)


class Linear(Module):
    """`y = x W^T + b`, and the forms with a norm, SwiGLU or the residual addition, which the
    format of the weight may fuse. `weight`: a parameter to share."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_format: WeightFormat

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        placement: Placement,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.mapping, self.communicator = placement.mapping, placement.communicator
        self.batch_invariant = placement.batch_invariant
        self.shares_weight = weight is not None
        self.bias = placement.parameter(out_features) if bias else None
        if weight is None:
            self.use(choose_format((out_features, in_features), placement, self.bias))
        else:
            self.use(plain_format(weight, placement, self.bias))

    def use(self, form: WeightFormat) -> None:
        """Replaces the weight, with its tensors and GEMMs."""
        if "weight_format" in self.__dict__:
            for name, _ in self.weight_format.parameters():
                setattr(self, name, None)
        self.weight_format = form
        for name, parameter in form.parameters():
            setattr(self, name, parameter)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        """`[T, K]` to `[T, N]`, of `norm(x)` if there is a norm."""
        return self.weight_format.forward(x, norm)

    def unrounded(self, x: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.unrounded`."""
        if x.dtype == torch.float32:
            return self.forward(x)
        return self.weight_format.unrounded(x)

    def gated(self, x: torch.Tensor, norm: RMSNorm | None = None, **gates: Any) -> torch.Tensor:
        """See `WeightFormat.gated`."""
        return self.weight_format.gated(x, norm, **gates)

    def write_to(self, out: torch.Tensor, x: torch.Tensor, norm: RMSNorm | None = None) -> None:
        """Write `forward` to `out` `[T, N]`, any stride between rows."""
        self.weight_format.write_to(out, x, norm)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add the outputs for x `[T, K]` to `total` `[T, N]`, in place."""
        self.weight_format.add_to(total, x)

    def widen(self, placement: Placement) -> None:
        self.use(choose_format(self.weight_format.shape, placement.wide, self.bias))

    def full_weight(self) -> torch.Tensor:
        """`[N, K]`, dequantised."""
        return self.weight_format.full_weight()

    @property
    def cpu_copy_bytes(self) -> int:
        """What `specialize_for_cpu` adds."""
        if not isinstance(self.weight_format, PlainWeight):
            return 0
        return cpu_copy_bytes(self.weight_format.weight, is_shared=self.shares_weight)

    def specialize_for_cpu(self) -> None:
        if isinstance(self.weight_format, CpuWeight):
            self.weight_format.specialize_for_cpu()


class ColumnLinear(Linear):
    """Column-parallel: each rank has a slice of the outputs of every part. `parts`: the names of
    the fused checkpoint tensors, with their full output sizes. `copies`: parts of which so many
    neighbouring ranks have the same slice. `orders`: int64, the rows of a rank's slice of a part in
    the order of the parameter's. `is_fused`: the checkpoint has all parts in one tensor, under the
    module's own name. `weight`: a parameter to share."""

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        placement: Placement,
        weight: nn.Parameter | None = None,
        copies: Mapping[str, int] = MappingProxyType({}),
        orders: Mapping[str, torch.Tensor] = MappingProxyType({}),
        is_fused: bool = False,
    ) -> None:
        local = {
            name: placement.mapping.shard(size * copies.get(name, 1), f"the output of {name}")
            for name, size in parts.items()
        }
        super().__init__(
            in_features, sum(local.values()), bias=bias, placement=placement, weight=weight
        )
        self.parts, self.copies, self.orders, self.is_fused = local, copies, orders, is_fused

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        """None for a shared weight, which the other module loads."""
        if self.shares_weight:
            return
        if self.is_fused:
            yield from self._fused_slots(path)
            return
        first = 0
        for name, size in self.parts.items():
            own, order = slice(first, first + size), self.orders.get(name)
            full, start = self._place(name)
            part = Part((full, self.weight_format.shape[1]), 0, start, order)
            module = sibling(path, name)
            yield f"{module}.weight", self.weight_format.slot(module, own, part)
            if self.bias is not None:
                yield f"{module}.bias", WeightSlot(self.bias[own], (full,), 0, start, order)
            first += size

    def _fused_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        assert self.bias is None
        rows, first = [], 0
        for name, size in self.parts.items():
            order, (full, start) = self.orders.get(name), self._place(name)
            rows.append(first + start + (torch.arange(size) if order is None else order))
            first += full
        part = Part((first, self.weight_format.shape[1]), order=torch.cat(rows))
        yield f"{path}.weight", self.weight_format.slot(path, slice(None), part)

    def _place(self, name: str) -> tuple[int, int]:
        """Outputs of a part on all ranks, and where this rank's begin."""
        size, copies = self.parts[name], self.copies.get(name, 1)
        return size * self.mapping.tp_size // copies, size * (self.mapping.tp_rank // copies)


class OutputLinear(ColumnLinear):
    """A column-parallel output layer. `shard`: the logits that this rank has; None: all of them.
    `tied`: the weight of an embedding, which it shares: this rank's rows."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        placement: Placement,
        tied: nn.Parameter | None = None,
    ) -> None:
        super().__init__(
            in_features,
            {"lm_head": out_features},
            bias=False,
            placement=placement.wide,
            weight=tied,
        )
        mapping = placement.mapping
        self.shard: VocabShard | None = None
        if mapping.tp_size > 1:
            size = self.parts["lm_head"]
            self.shard = VocabShard(placement.communicator, size * mapping.tp_rank, size)


class RowLinear(Linear):
    """Row-parallel: each rank has a slice of the inputs, and the outputs of all ranks are summed.
    Rank 0 adds the bias."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, placement: Placement
    ) -> None:
        local = placement.mapping.shard(in_features, "the input of a row-parallel layer")
        first_rank = placement.mapping.tp_rank == 0
        placement = placement.of_inputs(local, in_features)
        super().__init__(local, out_features, bias=bias and first_rank, placement=placement)
        self.has_bias = bias

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """As `Linear.add_to`, for the sum of all ranks."""
        if self.mapping.tp_size == 1:
            super().add_to(total, x)
            return
        self.communicator.all_reduce_into(total, self.forward(x))

    def add_gated_to(
        self, total: torch.Tensor, gate_up: Linear, x: torch.Tensor, norm: RMSNorm
    ) -> None:
        """`add_to` for `gate_up.gated(x, norm)`."""
        if self.mapping.tp_size == 1:
            self.weight_format.add_gated_to(total, gate_up.weight_format, x, norm)
        else:
            self.add_to(total, gate_up.gated(x, norm))

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """`forward`, and the sum over all ranks."""
        output = self.forward(x)
        if self.mapping.tp_size > 1:
            self.communicator.all_reduce(output)
        return output

    def add_part_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """As `add_to`, for this rank only: the caller sums over the ranks."""
        super().add_to(total, x)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        out_features, local = self.weight_format.shape
        shape = (out_features, local * self.mapping.tp_size)
        part = Part(shape, 1, local * self.mapping.tp_rank)
        yield f"{path}.weight", self.weight_format.slot(path, slice(None), part)
        if self.has_bias:
            yield f"{path}.bias", WeightSlot(self.bias, (out_features,))


# Chooses the fastest GEMM algorithm for the linear layers of loaded models and the numbers of rows
# that they will see: from the table on disk of an earlier start, or by measuring now.


logger = logging.getLogger(__name__)

MIN_WEIGHT_BYTES = 4 << 20  # for smaller weights the launch takes most of the time


@torch.inference_mode()
def tune_linears(
    models: Sequence[nn.Module],
    row_counts: Iterable[int],
    device: torch.device,
    communicator: Communicator = SINGLE,
) -> None:
    """Does nothing without CUDA. Only layers of `CudaWeight` are tuned; those with activations in
    FP8 use the library without. Waits for the device. Rank 0 chooses for all ranks, so that a layer
    that all have puts out the same bits on each."""
    layers = [layer for model in models for layer in model.modules() if isinstance(layer, Linear)]
    in_fp8 = [
        layer for layer in layers if isinstance(layer.weight_format.base, QuantisedActivations)
    ]
    layers = [layer for layer in layers if _is_worth_it(layer)]
    if device.type != "cuda" or not layers + in_fp8:
        return
    library = shared_library()
    if library is None:
        logger.info("libcublasLt was not found: linear layers run torch's choice of algorithm")
        return
    start, lt = monotonic(), CublasLt(library, device)
    gemms = Fp8Gemms(lt)
    for layer in in_fp8:
        assert isinstance(layer.weight_format.base, QuantisedActivations)
        layer.weight_format.base.use_library(gemms)
    name = torch.cuda.get_device_name(device)
    path = table_path(cache_folder(), name, lt.version, torch.__version__)
    table = read_table(path, ALGORITHM_BYTES)
    is_first, num_measured = communicator.mapping.rank == 0, 0
    if is_first:
        num_measured = tune_missing(table, lt, _by_shape(layers), row_counts)
    choices = communicator.broadcast(msgpack.packb(table) if is_first else b"")
    table = msgpack.unpackb(choices)
    tuned = TunedGemms(lt, table)
    for layer in layers:
        assert isinstance(layer.weight_format.base, CudaWeight)
        layer.weight_format.base.tuned_gemms = tuned
    if num_measured:
        torch.cuda.empty_cache()
        write_table(path, table)
        seconds = monotonic() - start
        logger.info("tuned %d GEMMs in %.1f s; see %s", num_measured, seconds, path)


def renew_derived(model: nn.Module) -> None:
    """Called after weights were replaced in place: renews what was derived from them since they
    were loaded."""
    for layer in model.modules():
        form = layer.weight_format if isinstance(layer, Linear) else None
        if isinstance(form, QuantisedActivations):
            form.renew_tiles()


def _is_worth_it(layer: Linear) -> bool:
    weight = layer.weight
    return (
        isinstance(layer.weight_format.base, CudaWeight)
        and weight.dtype in DATA_TYPES
        and weight.numel() * weight.element_size() >= MIN_WEIGHT_BYTES
    )


def _by_shape(layers: Iterable[Linear]) -> list[GemmGroup]:
    """The results of row-parallel layers are added to the residual stream, if no other rank's are
    added before."""
    found: dict[tuple[torch.Size, torch.dtype, bool], list[torch.Tensor]] = defaultdict(list)
    for layer in layers:
        adds = isinstance(layer, RowLinear) and layer.mapping.tp_size == 1
        found[layer.weight.shape, layer.weight.dtype, adds].append(layer.weight)
    return [GemmGroup(weights, adds) for (_, _, adds), weights in found.items()]
