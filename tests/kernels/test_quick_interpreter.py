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


def add_outer(x: Any, y: Any, out: Any) -> None:
    rows, columns = tl.arange(0, 4), tl.arange(0, 2)
    total = tl.load(x + rows)[:, None] + tl.load(y + columns)[None]
    tl.store(out + 2 * rows[:, None] + columns[None], total + total)


def test_tensors_of_other_shapes_are_broadcast_and_of_other_types_converted(quick: None) -> None:
    x, out = torch.arange(4, dtype=torch.float16), torch.zeros(4, 2)
    for y in (torch.tensor([0.5, 7.25]), torch.tensor([3, 9])):
        run(add_outer, x, y, out)
        assert torch.equal(out, 2 * (x[:, None] + y))


def load_three(x: Any) -> None:
    tl.load(x + tl.full((3,), 0, tl.int32))


def test_a_shape_that_is_no_power_of_two_is_refused_each_time(quick: None) -> None:
    for _ in range(2):
        with pytest.raises(interpreter.InterpreterError, match="power of 2"):
            run(load_three, torch.zeros(4))
