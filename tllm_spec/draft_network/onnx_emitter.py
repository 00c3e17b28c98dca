"""A network definition as an ONNX graph."""

from collections.abc import Sequence

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from tllm_spec.draft_network.emitter import Emitter

OPSET, IR_VERSION = 18, 10
_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int64: TensorProto.INT64,
}


class OnnxEmitter(Emitter[str]):
    """A value is its name in the graph. `weights`: the constants by name, which the graph itself
    does not hold."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def model(self) -> onnx.ModelProto:
        constants = [_external(name, tensor) for name, tensor in self.weights.items()]
        graph = helper.make_graph(
            self._nodes, "draft_model", self._inputs, self._outputs, constants
        )
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
        )

    def input(self, name: str, dtype: torch.dtype, shape: Sequence[int | str]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, _TYPES[dtype], shape))
        return name

    def output(self, name: str, value: str, dtype: torch.dtype) -> None:
        self._nodes.append(helper.make_node("Identity", [value], [name]))
        self._outputs.append(helper.make_tensor_value_info(name, _TYPES[dtype], None))

    def constant(self, tensor: torch.Tensor) -> str:
        name = f"constant.{len(self.weights)}"
        self.weights[name] = tensor.detach().contiguous()
        return name

    def linear(self, x: str, weight: torch.Tensor) -> str:
        return self.matmul(x, self.constant(weight.t()))

    def matmul(self, a: str, b: str) -> str:
        return self._node("MatMul", a, b)

    def gather(self, x: str, indices: str, axis: int) -> str:
        return self._node("Gather", x, indices, axis=axis)

    def last_row(self, x: str) -> str:
        return self.gather(x, self._ints([-1]), 1)

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        return self._node("Reshape", x, self._ints(shape))

    def transpose(self, x: str, order: Sequence[int]) -> str:
        return self._node("Transpose", x, perm=list(order))

    def concat(self, values: Sequence[str], axis: int) -> str:
        return self._node("Concat", *values, axis=axis)

    def cast(self, x: str, dtype: torch.dtype) -> str:
        return self._node("Cast", x, to=_TYPES[dtype])

    def add(self, a: str, b: str) -> str:
        return self._node("Add", a, b)

    def mul(self, a: str, b: str) -> str:
        return self._node("Mul", a, b)

    def at_least(self, a: str, b: str) -> str:
        return self._node("GreaterOrEqual", a, b)

    def select(self, condition: str, a: str, b: str) -> str:
        return self._node("Where", condition, a, b)

    def mean(self, x: str) -> str:
        return self._node("ReduceMean", x, self._ints([-1]), keepdims=1)

    def rsqrt(self, x: str) -> str:
        return self._node("Reciprocal", self._node("Sqrt", x))

    def sigmoid(self, x: str) -> str:
        return self._node("Sigmoid", x)

    def softmax(self, x: str) -> str:
        return self._node("Softmax", x, axis=-1)

    def _node(self, kind: str, *inputs: str, **attributes: object) -> str:
        name = f"value.{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def _ints(self, numbers: Sequence[int]) -> str:
        """A constant in the graph itself, since shapes follow from it."""
        value = onnx.numpy_helper.from_array(np.array(numbers, np.int64))
        return self._node("Constant", value=value)


def _external(name: str, tensor: torch.Tensor) -> TensorProto:
    """An initializer whose data is elsewhere."""
    proto = TensorProto(
        name=name,
        dims=tensor.shape,
        data_type=_TYPES[tensor.dtype],
        data_location=TensorProto.EXTERNAL,
    )
    entry = proto.external_data.add()
    entry.key, entry.value = "location", "weights"
    return proto
