"""What tests of kernels share."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels.interpreter import INTERPRETED


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's CUDA sources are kept compiled, and no other's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tllm_spec" / "cuda"


@pytest.fixture
def exact_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter leaves `tl.dot` to a BLAS, whose sums depend on a row's place in a tile. In
    float64 they do too, but not after the rounding to float32. Tensor cores need no such help."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    def dot(builder: Any, a: Any, b: Any, c: Any, *options: Any) -> Any:
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.float32)
        return interpreter.TensorHandle(product + c.data, c.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
