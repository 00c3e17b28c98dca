"""Runs a TensorRT network definition layer by layer in torch, so that its numbers can be checked
without a GPU. It knows the layers that the draft model's network has."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tllm_spec.draft_network.definition import NetworkModel
from tllm_spec.draft_network.tensorrt_build import define
from tllm_spec.draft_network.tensorrt_package import TensorRTPackage, trt_logger

trt = pytest.importorskip("tensorrt_rtx")  # there are wheels for Linux on x86-64
PACKAGE = TensorRTPackage(trt, trt.ComputeCapability.SM89, "")
_Layer = Any
_UNARY: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    trt.UnaryOperation.SQRT: torch.sqrt,
    trt.UnaryOperation.RECIP: torch.reciprocal,
    trt.UnaryOperation.NOT: torch.logical_not,
}
_ELEMENTWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    trt.ElementWiseOperation.SUM: torch.add,
    trt.ElementWiseOperation.SUB: torch.sub,
    trt.ElementWiseOperation.PROD: torch.mul,
    trt.ElementWiseOperation.LESS: torch.lt,
}


class InterpretedNetwork:
    """The network of a float32 model; `definition` is TensorRT's INetworkDefinition."""

    may_be_captured = False

    def __init__(self, model: NetworkModel) -> None:
        self._builder = trt.Builder(trt_logger(trt))
        self.definition, self._emitter = define(PACKAGE, self._builder, model)

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        for name, value in interpret(self.definition, inputs).items():
            assert outputs[name].shape == value.shape
            outputs[name].copy_(value)


def interpret(network: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs by name. Inputs may have any size in dimensions of -1 only."""
    values: dict[str, torch.Tensor] = {}
    for index in range(network.num_inputs):
        declared, given = network.get_input(index), inputs[network.get_input(index).name]
        sizes = zip(declared.shape, given.shape, strict=True)
        assert all(size in (-1, own) for size, own in sizes), declared.name
        values[declared.name] = given
    for layer in map(network.get_layer, range(network.num_layers)):
        kind = layer.type
        layer.__class__ = _CLASSES[kind]
        own = [values[layer.get_input(i).name] for i in range(layer.num_inputs)]
        values[layer.get_output(0).name] = _RULES[kind](layer, *own)
    names = [network.get_output(index).name for index in range(network.num_outputs)]
    return {name: values[name] for name in names}


def _shuffle(layer: _Layer, x: torch.Tensor) -> torch.Tensor:
    x = x.permute(*[layer.first_transpose[i] for i in range(x.dim())])
    shape = layer.reshape_dims
    if shape is None:
        return x
    return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape)])


def _axis(mask: int) -> int:
    """The only axis in a bit mask."""
    assert mask.bit_count() == 1
    return mask.bit_length() - 1


def _same_rank(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """TensorRT broadcasts dimensions of 1 only, and torch more."""
    assert a.dim() == b.dim() and a.dtype == b.dtype
    return a, b


def _select(_: _Layer, condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    assert condition.dtype == torch.bool
    return torch.where(condition, *_same_rank(a, b))


def _matmul(layer: _Layer, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    assert layer.op0 == trt.MatrixOperation.NONE
    a, b = _same_rank(a, b)
    return a @ (b.mT if layer.op1 == trt.MatrixOperation.TRANSPOSE else b)


def _gather(layer: _Layer, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    assert indices.min() >= 0
    shape = [*x.shape[: layer.axis], *indices.shape, *x.shape[layer.axis + 1 :]]
    return x.index_select(layer.axis, indices.flatten()).view(shape)


def _softmax(layer: _Layer, x: torch.Tensor) -> torch.Tensor:
    return x.softmax(_axis(layer.axes))


def _mean(layer: _Layer, x: torch.Tensor) -> torch.Tensor:
    assert layer.op == trt.ReduceOperation.AVG and layer.keep_dims
    return x.mean(_axis(layer.axes), keepdim=True)


def _sigmoid(layer: _Layer, x: torch.Tensor) -> torch.Tensor:
    assert layer.type == trt.ActivationType.SIGMOID
    return x.sigmoid()


_TABLE: dict[Any, tuple[Any, Callable[..., torch.Tensor]]] = {
    trt.LayerType.CONSTANT: (
        trt.IConstantLayer,
        lambda layer: torch.from_numpy(layer.weights.copy()).view(*layer.shape),
    ),
    trt.LayerType.IDENTITY: (trt.IIdentityLayer, lambda _, x: x),
    trt.LayerType.SHAPE: (trt.IShapeLayer, lambda _, x: torch.tensor(x.shape)),
    trt.LayerType.SHUFFLE: (trt.IShuffleLayer, _shuffle),
    trt.LayerType.GATHER: (trt.IGatherLayer, _gather),
    trt.LayerType.MATRIX_MULTIPLY: (trt.IMatrixMultiplyLayer, _matmul),
    trt.LayerType.SELECT: (trt.ISelectLayer, _select),
    trt.LayerType.SOFTMAX: (trt.ISoftMaxLayer, _softmax),
    trt.LayerType.REDUCE: (trt.IReduceLayer, _mean),
    trt.LayerType.ACTIVATION: (trt.IActivationLayer, _sigmoid),
    trt.LayerType.CONCATENATION: (
        trt.IConcatenationLayer,
        lambda layer, *parts: torch.cat(parts, layer.axis),
    ),
    trt.LayerType.UNARY: (trt.IUnaryLayer, lambda layer, x: _UNARY[layer.op](x)),
    trt.LayerType.ELEMENTWISE: (
        trt.IElementWiseLayer,
        lambda layer, a, b: _ELEMENTWISE[layer.op](*_same_rank(a, b)),
    ),
}
_CLASSES = {kind: found[0] for kind, found in _TABLE.items()}
_RULES = {kind: found[1] for kind, found in _TABLE.items()}
