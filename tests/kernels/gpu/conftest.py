"""The order in which the interpreter's products add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum every element of a product in one order, so that another tile shape would change its bits.

    The interpreter multiplies with numpy, where a row's bits depend on its place in the tile; tensor cores add up each
    element of a tile alike, and so does this.
    """

    def dot(builder: InterpreterBuilder, a: Any, b: Any, d: Any, *precision: Any) -> TensorHandle:
        acc = d.data.astype(np.float32)
        left, right = a.data.astype(np.float32), b.data.astype(np.float32)
        for k in np.roll(np.arange(left.shape[1]), left.shape[0] // 16 + right.shape[1] // 16):
            acc = acc + left[:, k : k + 1] * right[k : k + 1]
        return TensorHandle(acc, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
