"""One thread without gradients, and the order in which the interpreter's products add up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum every element of a product in one order, so that another tile shape would change its bits.

    The interpreter multiplies with numpy, where a row's bits depend on its place in the tile; tensor cores add up each
    element of a tile alike, and so does this.
    """

    def dot(builder: InterpreterBuilder, a: Any, b: Any, d: Any, *precision: Any) -> TensorHandle:
        left, right = a.data.astype(np.float32), b.data.astype(np.float32)
        order = np.roll(np.arange(left.shape[1]), left.shape[0] // 16 + right.shape[1] // 16)
        parts = left.T[order, :, None] * right[order, None]
        parts[0] += d.data
        return TensorHandle(np.add.reduce(parts), d.dtype.scalar)  # over the first axis numpy adds one after another

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
