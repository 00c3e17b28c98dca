"""Where tests of kernels run: on a CUDA device (`-m gpu`), and under Triton's interpreter in a
process of its own, which runs the same file again (the interpreter must be chosen before Triton is
imported)."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys

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

only_outside_the_interpreter = pytest.mark.skipif(INTERPRETED, reason="this is that process")

# The largest relative error of one rounding of float32. The interpreter cuts bfloat16 off instead.
ROUNDING = {
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8,
}


def stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a kernel's store makes of float32 `values`."""
    if INTERPRETED and dtype == torch.bfloat16:
        values = (values.view(torch.int32) & -0x10000).view(torch.float32)
    return values.to(dtype)


def check_like_the_reference(output: torch.Tensor, reference: torch.Tensor) -> None:
    """But for another order of float32 sums: one rounding apart, and that only in a few
    elements."""
    rounding = ROUNDING[output.dtype]
    torch.testing.assert_close(output, reference, rtol=2 * rounding + 4e-6, atol=4e-6)
    if output.dtype == torch.float16 or (output.dtype == torch.bfloat16 and not INTERPRETED):
        assert (output != reference).sum() <= 0.02 * output.numel()


def check_under_the_interpreter(file: str, num_tests: int) -> None:
    """At least `num_tests` tests of `file` ran on the interpreter, and all of them passed."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    version = importlib.metadata.version("triton")
    if tuple(map(int, version.split(".")[:2])) < (3, 7):
        pytest.skip(
            f"the interpreter of Triton {version} does not run with today's NumPy; 3.7 does"
        )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "interpreted", file]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    passed = next((line for line in done.stdout.splitlines() if " passed" in line), "0 passed")
    assert int(passed.split(" passed")[0].split()[-1]) >= num_tests, report
