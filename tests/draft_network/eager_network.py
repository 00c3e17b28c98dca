"""The network definition run operation by operation in torch, on any device and inside CUDA
graphs."""

from collections.abc import Mapping, Sequence
from itertools import count

import torch

from tllm_spec.draft_network.definition import NetworkModel, emit_network
from tllm_spec.draft_network.emitter import Emitter


class EagerEmitter(Emitter[torch.Tensor]):
    """Each operation runs as it is emitted. constants: on the device, in the order of the
    definition; the first run fills them."""

    def __init__(
        self,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        constants: list[torch.Tensor],
    ) -> None:
        self._inputs, self._outputs, self._constants = inputs, outputs, constants
        self._device = outputs["logits"].device
        self._numbers = count()

    def input(self, name: str, dtype: torch.dtype, shape: Sequence[int | str]) -> torch.Tensor:
        assert self._inputs[name].dtype == dtype
        return self._inputs[name]

    def output(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> None:
        assert self._outputs[name].dtype == value.dtype == dtype
        self._outputs[name].copy_(value)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        number = next(self._numbers)
        if number == len(self._constants):
            self._constants.append(tensor.to(self._device))
        return self._constants[number]

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ self.constant(weight).t()

    def matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    def gather(self, x: torch.Tensor, indices: torch.Tensor, axis: int) -> torch.Tensor:
        shape = [*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]]
        return x.index_select(axis, indices.flatten()).view(shape)

    def last_row(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, -1:]

    def reshape(self, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape)])

    def transpose(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        return x.permute(*order)

    def concat(self, values: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
        return torch.cat(list(values), axis)

    def cast(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    def mul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * b

    def at_least(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a >= b

    def select(self, condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.where(condition, a, b)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(-1, keepdim=True)

    def rsqrt(self, x: torch.Tensor) -> torch.Tensor:
        return x.rsqrt()

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid()

    def softmax(self, x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1)


class EagerNetwork:
    may_be_captured = True

    def __init__(self, model: NetworkModel) -> None:
        self._model = model
        self._constants: list[torch.Tensor] = []

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        emit_network(EagerEmitter(inputs, outputs, self._constants), self._model)
