"""A network definition through TensorRT's Python network API, which `tensorrt` and `tensorrt_rtx`
share."""

from collections.abc import Sequence
from typing import Any

import torch

from tllm_spec.draft_network.emitter import Emitter


class TensorRTEmitter(Emitter[Any]):
    """Adds layers to a strongly typed `network`; a value is an ITensor. trt: the package. The
    network points at the constants, so the emitter must live until the engine is built."""

    def __init__(self, trt: Any, network: Any) -> None:
        self._trt = trt
        self._network = network
        self._types = {
            torch.float32: trt.float32,
            torch.float16: trt.float16,
            torch.bfloat16: trt.bfloat16,
            torch.int32: trt.int32,
            torch.int64: trt.int64,
        }
        self._constants: list[torch.Tensor] = []

    def input(self, name: str, dtype: torch.dtype, shape: Sequence[int | str]) -> Any:
        dims = [-1 if isinstance(size, str) else size for size in shape]
        value = self._network.add_input(name, self._types[dtype], dims)
        for index, size in enumerate(shape):
            if isinstance(size, str):
                value.set_dimension_name(index, size)
        return value

    def output(self, name: str, value: Any, dtype: torch.dtype) -> None:
        value = self._first(self._network.add_identity(value))
        value.name = name
        assert value.dtype == self._types[dtype]
        self._network.mark_output(value)

    def constant(self, tensor: torch.Tensor) -> Any:
        kept = tensor.detach().cpu().contiguous()
        self._constants.append(kept)
        weights = self._trt.Weights(self._types[kept.dtype], kept.data_ptr(), kept.numel())
        return self._first(self._network.add_constant(tuple(kept.shape), weights))

    def linear(self, x: Any, weight: torch.Tensor) -> Any:
        how, matrix = self._trt.MatrixOperation, self.constant(weight.unsqueeze(0))
        layer = self._network.add_matrix_multiply(x, how.NONE, matrix, how.TRANSPOSE)
        return self._first(layer)

    def matmul(self, a: Any, b: Any) -> Any:
        how = self._trt.MatrixOperation.NONE
        return self._first(self._network.add_matrix_multiply(a, how, b, how))

    def gather(self, x: Any, indices: Any, axis: int) -> Any:
        return self._first(self._network.add_gather(x, indices, axis))

    def last_row(self, x: Any) -> Any:
        shape, one = self._first(self._network.add_shape(x)), torch.ones(1, dtype=torch.int64)
        width = self.gather(shape, self.constant(one), 0)
        return self.gather(x, self._elementwise("SUB", width, self.constant(one)), 1)

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        layer = self._network.add_shuffle(x)
        layer.reshape_dims = tuple(shape)
        return self._first(layer)

    def transpose(self, x: Any, order: Sequence[int]) -> Any:
        layer = self._network.add_shuffle(x)
        layer.first_transpose = tuple(order)
        return self._first(layer)

    def concat(self, values: Sequence[Any], axis: int) -> Any:
        layer = self._network.add_concatenation(list(values))
        layer.axis = axis
        return self._first(layer)

    def cast(self, x: Any, dtype: torch.dtype) -> Any:
        return self._first(self._network.add_cast(x, self._types[dtype]))

    def add(self, a: Any, b: Any) -> Any:
        return self._elementwise("SUM", a, b)

    def mul(self, a: Any, b: Any) -> Any:
        return self._elementwise("PROD", a, b)

    def at_least(self, a: Any, b: Any) -> Any:
        return self._unary("NOT", self._elementwise("LESS", a, b))

    def select(self, condition: Any, a: Any, b: Any) -> Any:
        return self._first(self._network.add_select(condition, a, b))

    def mean(self, x: Any) -> Any:
        last = 1 << (len(x.shape) - 1)
        how = self._trt.ReduceOperation.AVG
        return self._first(self._network.add_reduce(x, how, last, keep_dims=True))

    def rsqrt(self, x: Any) -> Any:
        return self._unary("RECIP", self._unary("SQRT", x))

    def sigmoid(self, x: Any) -> Any:
        return self._first(self._network.add_activation(x, self._trt.ActivationType.SIGMOID))

    def softmax(self, x: Any) -> Any:
        layer = self._network.add_softmax(x)
        layer.axes = 1 << (len(x.shape) - 1)
        return self._first(layer)

    def _elementwise(self, name: str, a: Any, b: Any) -> Any:
        how = getattr(self._trt.ElementWiseOperation, name)
        return self._first(self._network.add_elementwise(a, b, how))

    def _unary(self, name: str, x: Any) -> Any:
        return self._first(self._network.add_unary(x, getattr(self._trt.UnaryOperation, name)))

    def _first(self, layer: Any) -> Any:
        """The output of a layer. A layer that TensorRT does not take is None."""
        assert layer is not None
        return layer.get_output(0)
