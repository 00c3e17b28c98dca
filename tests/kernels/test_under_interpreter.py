"""Runs the tests of the Triton kernels, and of what uses them, under Triton's interpreter. All
files share a subprocess: importing torch and Triton takes longer than most of their tests."""

from pathlib import Path

import pytest
import torch

from tests.kernels.interpreter import check_files_under_the_interpreter
from tllm_spec.kernels.dispatch import has_kernels

FOLDER = Path(__file__).parent
OTHERS = ("attention/fp8_pool", "attention/latent", "attention/triton", "lossless/deterministic")
# Each has at least one test there.
FILES = sorted(
    str(path)
    for path in FOLDER.glob("test_*.py")
    if "\n@on_each_kernel_device\n" in path.read_text(encoding="utf-8")
) + [str(FOLDER.parents[0] / "{}/test_{}.py".format(*name.split("/"))) for name in OTHERS]


def test_the_kernels_pass_under_tritons_interpreter() -> None:
    """One combination of each test's parameters."""
    assert not has_kernels(torch.device("cpu")), "only the subprocess runs the interpreter"
    check_files_under_the_interpreter(FILES)


@pytest.mark.slow
def test_what_is_slow_passes_under_tritons_interpreter() -> None:
    check_files_under_the_interpreter(FILES, "-m", "slow and not gpu")
