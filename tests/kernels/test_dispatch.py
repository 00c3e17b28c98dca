"""An operation's kernel takes the reference's arguments, and a device without kernels runs the
reference."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.interpreter import only_with_the_compiler
from tllm_spec.kernels import dispatch
from tllm_spec.kernels.dispatch import Operation, with_kernel

KERNELS = Path(dispatch.__file__).parent
FILES = [path for path in KERNELS.glob("*/*.py") if "\n@with_kernel" in path.read_text("utf-8")]
MODULES = sorted(f"{path.parent.name}.{path.stem}" for path in FILES)


def operations(module: str) -> dict[str, Operation[Any, Any]]:
    found = vars(import_module(f"tllm_spec.kernels.{module}"))
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, Operation) and value.reference.__module__.endswith(f".{module}")
    }


@only_with_the_compiler
@pytest.mark.parametrize("module", MODULES)
def test_a_kernel_has_the_signature_of_its_reference(module: str) -> None:
    assert operations(module)
    for name, operation in operations(module).items():
        signature = inspect.signature(operation.kernel)
        assert signature == inspect.signature(operation.reference), name


@with_kernel("dispatch.kernel_of_this_test", argument=1)
def tell(number: int, x: torch.Tensor, *, twice: bool = False) -> str:
    """Says where it runs."""
    return f"reference, twice={twice}"


@pytest.mark.parametrize("has_kernels", [False, True])
def test_the_device_of_an_argument_decides(
    has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        dispatch, "has_kernels", lambda device: asked.append(device.type) or has_kernels
    )
    monkeypatch.setattr(
        dispatch,
        "kernel_of_this_test",
        lambda number, x, *, twice: f"kernel, twice={twice}",
        raising=False,
    )
    found = tell(3, torch.empty(0, device="meta"), twice=True)
    assert found == f"{'kernel' if has_kernels else 'reference'}, twice=True"
    assert asked == ["meta"] and tell.__doc__ == "Says where it runs."
