"""The faster interpreter still detects integer overflow and still runs device functions."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton.language as tl
from triton.runtime import interpreter

from tests.kernels import quick_interpreter


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_interpreter.install(monkeypatch.setattr)


def run(kernel: Callable[..., None], *arguments: Any, programs: int = 1) -> None:
    interpreter.InterpretedFunction(kernel)[(programs,)](*arguments)


def add(x: Any, n: Any) -> None:
    tl.store(x, tl.load(x) + n)


def subtract(x: Any, n: Any) -> None:
    tl.store(x, tl.load(x) - n)


def multiply(x: Any, n: Any) -> None:
    tl.store(x, tl.load(x) * n)


@pytest.mark.parametrize(
    ("kernel", "start", "fits", "too_much"),
    [
        (add, 2**31 - 10, 9, 10),
        (subtract, 2**31 - 10, -9, -10),
        (subtract, 10 - 2**31, 10, 11),
        (multiply, 2**30, -2, 2),
    ],
)
def test_an_integer_overflow_stops_the_launch(
    kernel: Callable[..., None], start: int, fits: int, too_much: int, quick: None
) -> None:
    for n, dtype in ((fits, torch.int32), (too_much, torch.int64)):  # no overflow in 64 bits
        run(kernel, torch.tensor([start], dtype=dtype), n)
    with pytest.raises(interpreter.InterpreterError, match="overflow"):
        run(kernel, torch.tensor([start], dtype=torch.int32), too_much)


def half(x: Any) -> Any:
    return tl.load(x) // 2


def halve(x: Any) -> None:
    index = tl.program_id(0)
    tl.store(x + index, device_function(x + index))


device_function = interpreter.InterpretedFunction(half)


def test_device_functions_run_in_every_launch_and_the_language_is_restored(quick: None) -> None:
    x = torch.tensor([1, 2, 7], dtype=torch.int32)
    for expected in ([0, 1, 3], [0, 0, 1]):
        run(halve, x, programs=3)
        assert x.tolist() == expected
    assert tl.core.is_builtin(tl.load)


def product(x: Any, y: Any) -> None:
    rows, columns = tl.arange(0, 64), tl.arange(0, 16)
    at = rows[:, None] * 16 + columns[None, :]
    square = tl.load(x + columns[:, None] * 16 + columns[None, :])
    tl.store(y + at, tl.dot(tl.load(x + at), square))


def test_a_row_of_a_dot_product_does_not_depend_on_its_place(quick: None) -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    x[16:] = x[:16].repeat(3, 1).roll(5, 0)
    y = torch.empty_like(x)
    run(product, x, y)
    assert torch.equal(y[16:], y[:16].repeat(3, 1).roll(5, 0))


def test_types_and_shapes_are_those_of_the_slow_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found() -> list[Any]:
        semantic = interpreter.interpreter_semantic
        result: list[Any] = []
        for kind in (tl.float32, tl.int32, tl.pointer_type(tl.float32)):
            blocks = [tl.block_type(kind, shape) for shape in ([4, 1], [1, 2], [4, 2], [4])]
            tensors = [tl.tensor(None, block) for block in blocks]
            result += [(block.name, block.numel, list(block.shape)) for block in blocks]
            result += [(own.dtype.name, own.numel, list(own.shape)) for own in tensors]
            result += [[one == other for one in blocks] for other in blocks]
        rows, columns = (semantic.arange(0, size) for size in (4, 2))
        pair = semantic.expand_dims(rows, 1), semantic.expand_dims(columns, 0)
        for lhs, rhs in (pair, pair[::-1], (rows, rows), (pair[0], rows), (rows, pair[0])):
            for own in semantic.broadcast_impl_value(lhs, rhs):
                result += [own.type.name, own.handle.data.tolist()]
        return result

    slow = found()
    quick_interpreter.install(monkeypatch.setattr)
    assert found() == slow and found() == slow  # made, and known


def test_a_shape_that_is_no_power_of_two_is_refused_each_time(quick: None) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.int32, [3])
