"""How kernels are compiled, kept on a disk, and chosen by device."""

import errno
import inspect
import os
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.interpreter import only_with_the_compiler
from tllm_spec.kernels import dispatch, nvrtc
from tllm_spec.kernels.disk_cache import cache_folder, write_file
from tllm_spec.kernels.dispatch import Operation, with_kernel

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def num_compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the names of the compiled sources."""
    compiled: list[str] = []
    real = nvrtc._compiled

    def counted(texts: list[tuple[str, bytes]], options: list[str]) -> bytes:
        compiled.append(texts[0][0])
        return real(texts, options)

    monkeypatch.setattr(nvrtc, "_compiled", counted)
    return compiled


def test_the_cache_folder_is_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_folder() == tmp_path / "tllm_spec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "tllm_spec"


def test_without_a_home_directory_nothing_is_cached(
    monkeypatch: pytest.MonkeyPatch, num_compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    for _ in range(2):
        assert nvrtc.compile_source("fill.cu", "sm_90").startswith(nvrtc.ELF)
    assert len(num_compiled) == 2 and "was not written" in caplog.text


def test_another_compiler_version_compiles_again(
    num_compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.bindings import nvrtc as library

    nvrtc.compile_source("fill.cu", "sm_90")
    success, major, minor = library.nvrtcVersion()
    monkeypatch.setattr(library, "nvrtcVersion", lambda: (success, major, minor + 1))
    nvrtc.compile_source("fill.cu", "sm_90")
    assert len(num_compiled) == 2


def test_a_source_is_compiled_once_per_architecture_and_definitions(
    num_compiled: list[str],
) -> None:
    first = nvrtc.compile_source("fill.cu", "sm_90")
    assert nvrtc.compile_source("fill.cu", "sm_90") == first and len(num_compiled) == 1
    nvrtc.compile_source("fill.cu", "sm_100")
    nvrtc.compile_source("fill.cu", "sm_90", (("SIZE", 3),))
    assert len(num_compiled) == 3


def test_changed_headers_compile_again(
    num_compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc.compile_source("fill.cu", "sm_90")
    read = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: read(path) + b"// changed" * (path.suffix == ".cuh")
    )
    nvrtc.compile_source("fill.cu", "sm_90")
    assert len(num_compiled) == 2


def test_a_damaged_cache_file_is_replaced(own_cache: Path, num_compiled: list[str]) -> None:
    whole = nvrtc.compile_source("fill.cu", "sm_90")
    (file,) = own_cache.iterdir()
    file.write_bytes(b"")
    assert nvrtc.compile_source("fill.cu", "sm_90") == whole and file.read_bytes() == whole
    assert len(num_compiled) == 2


def test_an_unwritable_cache_folder_is_logged_and_compiles_every_time(
    tmp_path: Path, num_compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tllm_spec").write_text("in the way")
    for _ in range(2):
        assert nvrtc.compile_source("fill.cu", "sm_90").startswith(nvrtc.ELF)
    assert len(num_compiled) == 2 and "was not written" in caplog.text


@pytest.mark.parametrize(
    ("major", "shared_kb", "installed", "reason"),
    [
        (8, 227, True, "compute capability 9.0"),
        (9, 227, False, r"tllm_spec\[cuda\]"),
        (12, 99, True, "227 KB of shared memory"),
        (10, 227, True, None),
    ],
)
def test_the_reason_why_cuda_kernels_cannot_run_is_given(
    major: int, shared_kb: int, installed: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(
        major=major, minor=0, shared_memory_per_block_optin=shared_kb << 10
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(nvrtc, "is_installed", lambda: installed)
    said = nvrtc.why_unavailable.__wrapped__(0)
    assert said is None if reason is None else re.search(reason, said)


@pytest.mark.parametrize("place", ["mkdir", "write_bytes", "replace"])
def test_a_full_disk_is_logged_once_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os if place == "replace" else Path, place, full)
    for name in ("a", "b"):
        write_file(tmp_path / "cache" / name, b"compiled")
    (message,) = caplog.messages
    assert "No space left on device" in message and str(tmp_path) in message
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


KERNELS = Path(dispatch.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(KERNELS).with_suffix("").parts)
    for path in KERNELS.rglob("*.py")
    if "\n@with_kernel" in path.read_text("utf-8")
)


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
