"""The first statement of a Triton kernel with programmatic dependent launch
(programmatic_launch.py). Importing this file imports Triton."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def begin(PDL: tl.constexpr) -> None:
    """Let the next kernel be set up, and wait for the end of the previous one."""
    launch_dependents(PDL)
    wait_for_previous(PDL)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def launch_dependents(PDL: tl.constexpr) -> None:
    """Let the next kernel be set up."""
    if PDL:
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def wait_for_previous(PDL: tl.constexpr) -> None:
    """Wait for the end of the previous kernel."""
    if PDL:
        gdc_wait()
