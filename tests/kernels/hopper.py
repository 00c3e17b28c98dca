"""Compiles a Triton kernel for Hopper without a device."""

from collections.abc import Mapping
from typing import Any


def compiled_for_hopper(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], **options: int
) -> Any:
    """The compiled stages and metadata. `types`: of the pointers, which are aligned to 16; a
    parameter that is in neither mapping is an int32."""
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
            if types.get(name, "").startswith("*")
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
