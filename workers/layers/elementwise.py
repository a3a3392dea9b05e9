"""Functions of single elements, whose bits depend on no other element."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...kernels.reference_state import one_by_one


def exp(x: Tensor) -> Tensor:
    return one_by_one(x).exp()


def softplus(x: Tensor) -> Tensor:
    """Compute log(1 + exp(x))."""
    return F.softplus(one_by_one(x))


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x times a factor; x itself if it is 1."""
    return x if factor == 1.0 else x * factor
