"""Operations that have a kernel: an operation is its plain-torch reference, which carries signature
and documentation, and the name of a function with the same signature that launches the kernel."""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

from tllm_spec.kernels.triton_support import has_kernels

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
        """Launches the kernel. Imports Triton."""
        module, _, name = self.path.partition(".")
        found: Callable[P, R] = getattr(import_module(f"tllm_spec.kernels.{module}"), name)
        return found


def with_kernel(path: str, argument: int = 0) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Declares the decorated function to be the reference of an operation.

    Args:
        path: module in `kernels/` and function that launches the kernel, with the parameters of the
            reference. Imported when it is first called.
        argument: index of the positional argument whose `device` decides.
    """

    def declare(reference: Callable[P, R]) -> Operation[P, R]:
        return Operation(reference, path, argument)

    return declare
