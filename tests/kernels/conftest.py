"""Fixtures of the kernels' tests."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels.interpreter import INTERPRETED


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for compiled CUDA sources."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tllm_spec" / "cuda"


@pytest.fixture
def exact_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter computes `tl.dot` with a BLAS, whose sums depend on a row's position in the
    tile. Computed in float64 and rounded to float32 they do not. Tensor cores do not need this."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    def dot(builder: Any, a: Any, b: Any, c: Any, *options: Any) -> Any:
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.float32)
        return interpreter.TensorHandle(product + c.data, c.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
