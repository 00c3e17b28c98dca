"""The operations that a network definition is written in. Each backend has an emitter that adds
them to a graph of its own."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

Value = TypeVar("Value")


class Emitter(ABC, Generic[Value]):
    """Operands of one operation have the same rank and dtype; dimensions of 1 are broadcast."""

    @abstractmethod
    def input(self, name: str, dtype: torch.dtype, shape: Sequence[int | str]) -> Value:
        """A dimension with a name is known when the network runs."""

    @abstractmethod
    def output(self, name: str, value: Value, dtype: torch.dtype) -> None: ...

    @abstractmethod
    def constant(self, tensor: torch.Tensor) -> Value:
        """A tensor that must not change."""

    @abstractmethod
    def linear(self, x: Value, weight: torch.Tensor) -> Value:
        """`x W^T` for x `[B, W, K]` and weight `[N, K]`."""

    @abstractmethod
    def matmul(self, a: Value, b: Value) -> Value: ...

    @abstractmethod
    def gather(self, x: Value, indices: Value, axis: int) -> Value: ...

    @abstractmethod
    def last_row(self, x: Value) -> Value:
        """`[B, W, N]` to `[B, 1, N]`."""

    @abstractmethod
    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """0: the dimension of x at this index; -1: what is left."""

    @abstractmethod
    def transpose(self, x: Value, order: Sequence[int]) -> Value: ...

    @abstractmethod
    def concat(self, values: Sequence[Value], axis: int) -> Value: ...

    @abstractmethod
    def cast(self, x: Value, dtype: torch.dtype) -> Value: ...

    @abstractmethod
    def add(self, a: Value, b: Value) -> Value: ...

    @abstractmethod
    def mul(self, a: Value, b: Value) -> Value: ...

    @abstractmethod
    def at_least(self, a: Value, b: Value) -> Value:
        """`a >= b`, boolean."""

    @abstractmethod
    def select(self, condition: Value, a: Value, b: Value) -> Value:
        """`a` where the condition holds, else `b`."""

    @abstractmethod
    def mean(self, x: Value) -> Value:
        """The mean over the last dimension, which becomes 1."""

    @abstractmethod
    def rsqrt(self, x: Value) -> Value: ...

    @abstractmethod
    def sigmoid(self, x: Value) -> Value: ...

    @abstractmethod
    def softmax(self, x: Value) -> Value:
        """The softmax over the last dimension."""
