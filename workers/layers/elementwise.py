"""Functions of single elements."""

from __future__ import annotations

from torch import Tensor


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x times a factor; x itself if it is 1."""
    return x if factor == 1.0 else x * factor
