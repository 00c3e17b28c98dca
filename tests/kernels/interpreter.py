"""Where the tests of Triton kernels run: on a CUDA device (`-m gpu`), and under Triton's
interpreter in a subprocess that runs the same file again, because the interpreter must be chosen
before Triton is imported."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = (
    [pytest.param("cpu", id="interpreted")]
    if INTERPRETED
    else [pytest.param("cuda", marks=pytest.mark.gpu)]
)
on_each_kernel_device = pytest.mark.parametrize("device", DEVICES)
if INTERPRETED:
    from tests.kernels import quick_interpreter

    quick_interpreter.install()

only_outside_the_interpreter = pytest.mark.skipif(INTERPRETED, reason="runs outside it")
only_with_the_compiler = pytest.mark.skipif(
    INTERPRETED or importlib.util.find_spec("triton") is None, reason="Triton does not compile"
)

# The largest relative error of rounding float32. The interpreter truncates to bfloat16.
ROUNDING = {
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8,
}


def stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 `values` as a kernel stores them."""
    if INTERPRETED and dtype == torch.bfloat16:
        values = (values.view(torch.int32) & -0x10000).view(torch.float32)
    return values.to(dtype)


def check_like_the_reference(output: torch.Tensor, reference: torch.Tensor) -> None:
    """Equal but for the order of float32 sums: one rounding apart, and only in a few elements."""
    rounding = ROUNDING[output.dtype]
    torch.testing.assert_close(output, reference, rtol=2 * rounding + 4e-6, atol=4e-6)
    if output.dtype == torch.float16 or (output.dtype == torch.bfloat16 and not INTERPRETED):
        assert (output != reference).sum() <= 0.02 * output.numel()


def check_files_under_the_interpreter(files: Sequence[str], *options: str) -> None:
    """All tests of the files pass under the interpreter, in one subprocess with more `options` of
    pytest; without such, some test of each file runs."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    version = importlib.metadata.version("triton")
    if tuple(map(int, version.split(".")[:2])) < (3, 7):
        pytest.skip(f"the interpreter of Triton {version} does not run with NumPy 2; 3.7 does")
    own = ["-p", "no:cacheprovider", "-n", "0", "-rp", "-k", "interpreted"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *own, *options, *files],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    for file in files if not options else ():
        assert f"/{Path(file).name}::" in done.stdout, report
