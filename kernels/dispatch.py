"""Operations that have a kernel: an operation is its plain-torch reference, which carries signature
and documentation, and the name of a function with the same signature that launches the kernel."""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

import torch

# Triton, where it is installed and its kernels can run, and whether they run on a device.


class _NotLoaded:
    """Stands in for Triton, so that a file with kernels can be imported: what it decorates is
    never launched."""

    def __getattr__(self, name: str) -> "_NotLoaded":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else self


_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _is_used() -> bool:
    """Without a GPU and the interpreter, Triton and the sources of its kernels would take a quarter
    of a process's start. A program that compiles kernels for a GPU elsewhere imports it first."""
    return _IS_INTERPRETED or "triton" in sys.modules or torch.cuda.device_count() > 0


def _loaded(name: str) -> Any:
    try:
        return import_module(name) if _is_used() else _NotLoaded()
    except ImportError:
        return _NotLoaded()


triton, tl = _loaded("triton"), _loaded("triton.language")
tl_cuda = _loaded("triton.language.extra.cuda")


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton is installed and the device is CUDA, or the CPU with Triton's interpreter
    (TRITON_INTERPRET=1)."""
    runs = device.type == "cuda" or (device.type == "cpu" and _IS_INTERPRETED)
    return runs and importlib.util.find_spec("triton") is not None


P = ParamSpec("P")
R = TypeVar("R")


class Operation(Generic[P, R]):
    """Runs the kernel on devices that have kernels, elsewhere the reference."""

    def __init__(self, reference: Callable[P, R], path: str, argument: int) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self.path, self._argument = path, argument

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        decides: Any = args[self._argument]
        if has_kernels(decides.device):
            return self.kernel(*args, **kwargs)
        return self.reference(*args, **kwargs)

    @functools.cached_property
    def kernel(self) -> Callable[P, R]:
        """Launches the kernel."""
        module, _, name = self.path.rpartition(".")
        module = f"tllm_spec.kernels.{module}" if module else self.reference.__module__
        found: Callable[P, R] = getattr(import_module(module), name)
        return found


def with_kernel(path: str, argument: int = 0) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Declares the decorated function to be the reference of an operation.

    Args:
        path: the function that launches the kernel, with the parameters of the reference; of
            another file with the file's name before it (`states.gated_delta_triton.gated_delta`).
        argument: index of the positional argument whose `device` decides.
    """

    def declare(reference: Callable[P, R]) -> Operation[P, R]:
        return Operation(reference, path, argument)

    return declare
