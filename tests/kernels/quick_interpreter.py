"""Makes Triton's interpreter faster without changing its results or checks: calls of device
functions do not patch `triton.language` again, what is patched and what follows from a type is
found once, tensors of one shape are not broadcast, and the check for integer overflow is two NumPy
operations. And a row of `tl.dot` does not depend on the other rows, as on a GPU."""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
from triton.language.core import is_builtin
from triton.runtime import interpreter

OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
LANGUAGES = (interpreter.tl, interpreter.tl.core)


def install(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """For the rest of the process."""
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    broadcast = semantic.broadcast_impl_value
    builder = interpreter.InterpreterBuilder
    for owner, name, new in (
        (interpreter, "_patch_lang", _once_a_launch(interpreter._patch_lang)),
        (interpreter, "_patch_builtin", _patch_builtin),
        (interpreter, "_get_np_dtype", _looked_up_once(interpreter._get_np_dtype)),
        (semantic, "binary_op_sanitize_overflow_impl", _assert_no_overflow),
        (semantic, "broadcast_impl_value", _unless_shapes_are_equal(broadcast)),
        (builder, "create_dot", _summed_in_64_bits(builder.create_dot)),
        (core.dtype, "__eq__", _or_the_same_object(core.dtype.__eq__)),
        (core.block_type, "__init__", _checked_once(core.block_type.__init__)),
        (core.tensor, "__init__", _with_known_shape(core.tensor.__init__)),
    ):
        replace(owner, name, new)


def _once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter patches the language's functions at every launch, and again in every call of
    a device function. The latter is only needed for modules that are not patched yet."""

    def patch_lang(function: Any) -> Any:
        languages = [own for own in function.__globals__.values() if own in LANGUAGES]
        replaced = not any(is_builtin(own.load) for own in languages)
        return interpreter._LangPatchScope() if replaced else patch(function)

    return patch_lang


def _patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's, which looks through all members of a module or class every time."""
    for name, interpreted in _interpreted_members(owner):
        scope.set_attr(owner, name, interpreted)


@cache
def _interpreted_members(owner: Any) -> list[tuple[str, Callable[..., Any]]]:
    def interpreted(member: Callable[..., Any]) -> Callable[..., Any]:
        semantic = interpreter.interpreter_semantic
        return lambda *args, _semantic=None, **named: member(*args, _semantic=semantic, **named)

    members = ((name, getattr(owner, name)) for name in dir(owner))
    return [(name, interpreted(member)) for name, member in members if is_builtin(member)]


def _looked_up_once(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    found = lru_cache(numpy_type)
    pointer = np.dtype(np.uint64)
    return lambda kind: pointer if kind.scalar.is_ptr() else found(kind.scalar)


def _summed_in_64_bits(create_dot: Callable[..., Any]) -> Callable[..., Any]:
    """NumPy's BLAS has, on some processors, other sums for a row in another place. In float64 the
    difference is lost when the product is rounded to float32."""

    def dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32:
            return create_dot(builder, a, b, d, *options)
        zeros = interpreter.TensorHandle(np.zeros(d.data.shape, np.float64), interpreter.tl.float64)
        product = create_dot(builder, a, b, zeros, *options).data.astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    return dot


def _or_the_same_object(equals: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda mine, other: mine is other or equals(mine, other)


def _unless_shapes_are_equal(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast_if_needed(lhs: Any, rhs: Any) -> Any:
        both_are_blocks = lhs.type.is_block() and rhs.type.is_block()
        if both_are_blocks and list(lhs.type.shape) == list(rhs.type.shape):
            return lhs, rhs
        return broadcast(lhs, rhs)

    return broadcast_if_needed


def _checked_once(init: Callable[..., None]) -> Callable[..., None]:
    """A block type's shape is checked, and its name made, once for each element type and shape."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init_block_type(block: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in known:
            init(block, element_ty, shape)
            known[key] = dict(vars(block))
        block.__dict__.update(known[key], element_ty=element_ty)

    return init_block_type


def _with_known_shape(init: Callable[..., None]) -> Callable[..., None]:
    """A tensor's shape as compile-time constants is made once for each type."""
    known: dict[str, dict[str, Any]] = {}

    def init_tensor(tensor: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            init(tensor, handle, type)
            known[type.name] = dict(vars(tensor))
        tensor.__dict__.update(known[type.name], handle=handle, type=type, dtype=type.scalar)

    return init_tensor


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
