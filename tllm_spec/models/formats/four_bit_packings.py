"""Unpacks the 4-bit weights of each checkpoint format: codes, scales and zero points of a module,
with a row for each output."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tllm_spec.kernels.gemm.int4_weights import int4_dequantised
from tllm_spec.models.formats.quantisation import Packing

# A checkpoint's weight of 4 bits, and what can become one.


@dataclass(frozen=True)
class FourBitTensor:
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


Tensors = Mapping[str, torch.Tensor]
"""A module's, by the last part of their names."""
# The column, of 8, that each 4 bits of AWQ's words have, and the inverse.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_PLACES = tuple(AWQ_ORDER.index(column) for column in range(8))
SYMMETRIC_ZERO = 8
_ZEROS, _ORDERS = ("qzeros", "weight_zero_point"), ("g_idx", "weight_g_idx")


@dataclass(frozen=True)
class Unpacked:
    """A weight `[N, K]` with G groups in each row."""

    codes: torch.Tensor
    """`[N, K]` uint8, 0 to 15."""
    scales: torch.Tensor
    """`[N, G]`."""
    zeros: torch.Tensor | None
    """`[N, G]` uint8; None: 8."""
    groups: torch.Tensor | None = None
    """`[K]`: the group of each input; None: neighbours share one."""


@dataclass(frozen=True)
class PackedTensors:
    """The tensors of a module in one format, by the last part of their names."""

    codes: str
    scales: str
    optional: tuple[str, ...]
    unpack: Callable[[Tensors], Unpacked]
    dtype: torch.dtype = torch.int32
    """The type of codes and zero points. Tensors with the name of codes and another type are
    weights that are not quantised, if the name is `weight`."""
    required: tuple[str, ...] = ()
    """Next to codes and scales."""

    def needed(self, *, has_zeros: bool, is_ordered: bool) -> list[str]:
        """Next to codes, with zero points or with groups in an order of their own."""
        names = set[str]().union(_ZEROS if has_zeros else (), _ORDERS if is_ordered else ())
        return [self.scales, *self.required, *(name for name in self.optional if name in names)]


def four_bits(words: torch.Tensor) -> torch.Tensor:
    """int32 `[R, C]` as uint8 `[R, 8C]`, or uint8 as `[R, 2C]`: the lowest bits of a word come
    first."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)


def _awq_columns(words: torch.Tensor) -> torch.Tensor:
    columns = four_bits(words).view(len(words), -1, 8)
    return columns[..., _AWQ_PLACES].flatten(1)


def _unpack_awq(tensors: Tensors) -> Unpacked:
    """`qweight` `[K, N / 8]`, `qzeros` `[G, N / 8]`, `scales` `[G, N]`."""
    zeros = _awq_columns(tensors["qzeros"]).t() if "qzeros" in tensors else None
    return Unpacked(_awq_columns(tensors["qweight"]).t(), tensors["scales"].t(), zeros)


def _unpack_gptq(tensors: Tensors, offset: int) -> Unpacked:
    """`qweight` `[K / 8, N]`, `qzeros` `[G, N / 8]`, `scales` `[G, N]`, `g_idx` `[K]`. offset: what
    was subtracted from zero points. They are 4-bit numbers, so 0 was stored as 15."""
    zeros = (four_bits(tensors["qzeros"]) + offset & 15).t() if "qzeros" in tensors else None
    codes = four_bits(tensors["qweight"].t())
    return Unpacked(codes, tensors["scales"].t(), zeros, tensors.get("g_idx"))


def _unpack_compressed(tensors: Tensors) -> Unpacked:
    """`weight_packed` `[N, ceil(K / 8)]`, `weight_zero_point` `[ceil(N / 8), G]`, `weight_scale`
    `[N, G]`, `weight_g_idx` `[K]`. Codes and zero points are signed numbers plus 8, which their
    difference does not need."""
    codes = four_bits(tensors["weight_packed"])
    if "weight_shape" in tensors:
        codes = codes[:, : int(tensors["weight_shape"][1])]
    zeros = None
    if "weight_zero_point" in tensors:
        zeros = four_bits(tensors["weight_zero_point"].t()).t()[: len(codes)]
    return Unpacked(codes, tensors["weight_scale"], zeros, tensors.get("weight_g_idx"))


def _unpack_mxfp4(tensors: Tensors) -> Unpacked:
    """`weight_packed` `[N, K / 2]`, `weight_scale` `[N, K / 32]`: exponents of E8M0, plus 127."""
    scales = mxfp4_scales(tensors["weight_scale"].view(torch.uint8))
    return Unpacked(four_bits(tensors["weight_packed"]), scales, None)


def mxfp4_scales(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 exponents of E8M0, plus 127, as float32."""
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)


def _unpack_nvfp4(tensors: Tensors) -> Unpacked:
    """`weight_packed` `[N, K / 2]`, `weight_scale` `[N, K / 16]` E4M3, and the number that scales
    are divided by, `[1]` float32."""
    scales = tensors["weight_scale"].float() / tensors["weight_global_scale"]
    return Unpacked(four_bits(tensors["weight_packed"]), scales, None)


def _unpack_modelopt(tensors: Tensors) -> Unpacked:
    """The same of ModelOpt: `weight`, and `[]` a factor of the scales."""
    scales = tensors["weight_scale"].float() * tensors["weight_scale_2"]
    return Unpacked(four_bits(tensors["weight"]), scales, None)


# The numbers that mean a zero point of 8, with the version that has them.
_GPTQ_EIGHTS: Mapping[int, Packing] = {7: "gptq", 8: "gptq_v2"}
EIGHTS: Mapping[Packing, Mapping[int, Packing]] = {
    "awq": {8: "awq"},
    "gptq": _GPTQ_EIGHTS,
    "gptq_v2": _GPTQ_EIGHTS,
}
_GPTQ = "qweight", "scales", ("qzeros", "g_idx")
PACKINGS: dict[Packing, PackedTensors] = {
    "awq": PackedTensors("qweight", "scales", ("qzeros",), _unpack_awq),
    "gptq": PackedTensors(*_GPTQ, lambda tensors: _unpack_gptq(tensors, 1)),
    "gptq_v2": PackedTensors(*_GPTQ, lambda tensors: _unpack_gptq(tensors, 0)),
    "compressed": PackedTensors(
        "weight_packed",
        "weight_scale",
        ("weight_zero_point", "weight_shape", "weight_g_idx"),
        _unpack_compressed,
    ),
    "mxfp4": PackedTensors("weight_packed", "weight_scale", (), _unpack_mxfp4, torch.uint8),
    "nvfp4": PackedTensors(
        "weight_packed",
        "weight_scale",
        ("input_global_scale",),
        _unpack_nvfp4,
        torch.uint8,
        ("weight_global_scale",),
    ),
    "modelopt": PackedTensors(
        "weight", "weight_scale", (), _unpack_modelopt, torch.uint8, ("weight_scale_2",)
    ),
}
