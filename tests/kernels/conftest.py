"""What tests of kernels share."""

from typing import Any

import numpy as np
import pytest

from tests.kernels.interpreter import INTERPRETED


@pytest.fixture
def exact_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter leaves `tl.dot` to a BLAS, whose sums depend on a row's place in a tile. In float64 they do too,
    but not after the rounding to float32. Tensor cores need no such help."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    def dot(builder: Any, a: Any, b: Any, c: Any, *options: Any) -> Any:
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.float32)
        return interpreter.TensorHandle(product + c.data, c.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
