"""The first statement of a Triton kernel that may be launched early (programmatic_launch.py).
Importing this file imports Triton."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def begin(EARLY: tl.constexpr) -> None:
    """Let the next kernel be set up, and wait for the end of the one before."""
    announce(EARLY)
    wait(EARLY)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def announce(EARLY: tl.constexpr) -> None:
    """Let the next kernel be set up."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def wait(EARLY: tl.constexpr) -> None:
    """For the end of the kernel before."""
    if EARLY:
        gdc_wait()
