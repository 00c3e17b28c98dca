"""Makes Triton's interpreter faster without changing its results or checks: calls of device
functions do not patch `triton.language` again, types are looked up once, and the check for integer
overflow is two NumPy operations."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from triton.language.core import is_builtin
from triton.runtime import interpreter

OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def install() -> None:
    """For the rest of the process."""
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _looked_up_once(interpreter._get_np_dtype)
    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = _assert_no_overflow


def _once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter patches the language's functions at every launch, and again in every call of
    a device function. The latter is only needed for modules that are not patched yet."""

    def patch_lang(function: Any) -> Any:
        languages = [own for own in function.__globals__.values() if own in LANGUAGES]
        replaced = not any(is_builtin(own.load) for own in languages)
        return interpreter._LangPatchScope() if replaced else patch(function)

    return patch_lang


LANGUAGES = (interpreter.tl, interpreter.tl.core)


def _looked_up_once(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    found = lru_cache(numpy_type)
    pointer = np.dtype(np.uint64)
    return lambda kind: pointer if kind.scalar.is_ptr() else found(kind.scalar)


def _assert_no_overflow(lhs: Any, rhs: Any, operation: Callable[..., Any]) -> None:
    """The same check as Triton's: the result in 64 bits must fit the type of the operands."""
    scalar = lhs.type.scalar
    assert scalar == rhs.type.scalar and scalar.is_int()
    if scalar.int_bitwidth >= 64:
        return
    wide = [operand.handle.data.astype(np.int64) for operand in (lhs, rhs)]
    found = OPERATIONS[operation.__name__](*wide)
    inside = scalar.get_int_min_value() <= found.min() and found.max() <= scalar.get_int_max_value()
    assert inside, f"{scalar} overflows in {operation.__name__}"
