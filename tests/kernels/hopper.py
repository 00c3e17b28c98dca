"""Compiles a Triton kernel without a device: for Hopper, or for any compute capability."""

from collections.abc import Collection, Mapping
from typing import Any

HOPPER = 90


def compiled_for_hopper(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible: Collection[str] = (),
    **options: int,
) -> Any:
    """`compiled_for` Hopper."""
    return compiled_for(HOPPER, kernel, types, constants, divisible, **options)


def compiled_for(
    capability: int,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible: Collection[str] = (),
    **options: int,
) -> Any:
    """The compiled stages and metadata. `capability`: ten times the compute capability; `types`: of
    the pointers, which are aligned to 16; a parameter that is in neither mapping is an int32.
    `divisible`: those that 16 divides."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", capability, 32)
    return triton.compile(_source(kernel, types, constants, divisible), target, options)


def check_front_end(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible: Collection[str] = (),
    **options: int,
) -> None:
    """Triton's front end, which takes a tenth of the time, accepts the kernel for Hopper."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", HOPPER, 32))
    parsed, context = backend.parse_options(dict(options)), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    source = _source(kernel, types, constants, divisible)
    assert source.make_ir(backend.target, parsed, codegen, modules, context)


def _source(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], divisible: Collection[str]
) -> Any:
    from triton.compiler import ASTSource

    names = kernel.arg_names
    return ASTSource(
        kernel,
        {name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if types.get(name, "").startswith("*") or name in divisible
        },
    )
