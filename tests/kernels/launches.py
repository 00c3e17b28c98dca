"""The launches of a wrapper as they would be on a GPU of any compute capability, which needs no
device: tensors are on torch's device `meta`, and launches are recorded instead of made."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.hopper import HOPPER, check_front_end, compiled_for
from tllm_spec.kernels import dispatch
from tllm_spec.kernels.launch import (
    TENSOR_COLUMNS,
    has_tensor_memory,
    programmatic_launch,
    shared_memory_bytes,
)

# KiB of shared memory that a program may have, by ten times the compute capability.
LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
FIRST_WITH_FP8 = 89  # others get dequantised weights
META = torch.device("meta")
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.uint32: "u32",
    torch.int64: "i64",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Launch:
    """kernel: Triton's object; types, constants, divisible: as of `compiled_for`; options: of the
    launch, such as `num_warps`."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kernel.fn.__module__.rpartition('.')[2]}.{self.kernel.fn.__name__}"

    @property
    def key(self) -> str:
        """Equal for launches with the same tiles, types and flags, whatever the other sizes."""
        sizes = {
            name: value if name.startswith("BLOCK") or name == "HEAD_DIM" else bool(value)
            for name, value in self.constants.items()
        }
        parts = (self.types, sizes, self.options)
        return f"{self.name} {[sorted(part.items()) for part in parts]}"

    def runs_on(self, capability: int) -> bool:
        has_fp8 = any("fp8" in name for name in self.types.values())
        return capability >= FIRST_WITH_FP8 or not has_fp8

    def compiled(self, capability: int) -> Any:
        return compiled_for(
            capability, self.kernel, self.types, self.constants, self.divisible, **self.options
        )

    def check_front_end(self) -> None:
        check_front_end(self.kernel, self.types, self.constants, self.divisible, **self.options)

    def check(self, capability: int) -> None:
        """It compiles, and a GPU of the capability has the memory that a program needs; on Hopper
        without local memory, which would be slow."""
        code = self.compiled(capability)
        assert code.asm["cubin"] and (capability != HOPPER or ".local" not in code.asm["ptx"])
        assert code.metadata.shared <= LIMITS[capability] << 10, (self.key, code.metadata.shared)
        columns = getattr(code.metadata, "tmem_size", None) or 0
        assert columns <= TENSOR_COLUMNS, (self.key, columns)


def launch_of(kernel: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Launch:
    """What Triton would compile for these arguments: it makes constants of None and of 1."""
    names = kernel.arg_names
    values = {each.name: each.default for each in kernel.params if each.has_default}
    values |= zip(names, arguments, strict=False)
    values |= {name: value for name, value in keywords.items() if name in names}
    assert len(values) == len(names), f"{set(names) - set(values)} of {kernel} are missing"
    types, constants, divisible = {}, {}, []
    for parameter in kernel.params:
        name, value = parameter.name, values[parameter.name]
        is_one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            types[name] = f"*{TYPES[value.dtype]}"
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            types[name] = "i1" if isinstance(value, bool) else "i64" if value >> 31 else "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                divisible.append(name)
    options = {name: value for name, value in keywords.items() if name not in names}
    return Launch(kernel, types, constants, tuple(divisible), options)


def use_gpu(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that its device is a GPU of the capability."""
    major, minor = divmod(capability, 10)
    properties = SimpleNamespace(
        major=major, minor=minor, shared_memory_per_block_optin=LIMITS[capability] << 10
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def launches_of(
    call: Callable[[], None], capability: int, monkeypatch: pytest.MonkeyPatch
) -> list[Launch]:
    """What the wrappers in `call` launch on a GPU of the capability, one for each `key`."""
    from triton.runtime.jit import JITFunction

    folder = Path(dispatch.__file__).parent
    for path in folder.rglob("*.py"):  # what is imported later stays replaced
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        import_module(f"tllm_spec.kernels.{name}")
    use_gpu(capability, monkeypatch)
    device = torch.device("cuda", 0)
    shared_bytes = shared_memory_bytes.__wrapped__(device)
    has_tensors = has_tensor_memory.__wrapped__(device)
    launch = programmatic_launch.__wrapped__
    replaced: dict[str, Callable[..., Any]] = {
        "has_kernels": lambda device: True,
        "programmatic_launch": lambda _, *warps: launch(device, *warps),
        "shared_memory_bytes": lambda device: shared_bytes,
        "has_tensor_memory": lambda device: has_tensors,
    }
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("tllm_spec.kernels."):
            for name in replaced.keys() & vars(module).keys():
                monkeypatch.setattr(module, name, replaced[name])
    found: dict[str, Launch] = {}

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        made = launch_of(kernel, arguments, keywords)
        found.setdefault(made.key, made)

    monkeypatch.setattr(JITFunction, "run", run)
    call()
    return [made for made in found.values() if made.runs_on(capability)]
