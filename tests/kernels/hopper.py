"""Compiles a Triton kernel for Hopper without a device."""

from collections.abc import Collection, Mapping
from typing import Any


def compiled_for_hopper(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible: Collection[str] = (),
    **options: int,
) -> Any:
    """The compiled stages and metadata. `types`: of the pointers, which are aligned to 16; a
    parameter that is in neither mapping is an int32. `divisible`: those that 16 divides."""
    import triton
    from triton.backends.compiler import GPUTarget

    names = kernel.arg_names
    source = triton.compiler.ASTSource(
        kernel,
        {name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if types.get(name, "").startswith("*") or name in divisible
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
