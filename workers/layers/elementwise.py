"""Functions of single elements, whose bits depend on no other element.

On a CPU torch computes dense elements as vectors, but the last ones one by one, which rounds differently; it computes
strided elements all one by one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def exp(x: Tensor) -> Tensor:
    return _strided(x).exp()


def softplus(x: Tensor) -> Tensor:
    """Compute log(1 + exp(x))."""
    return F.softplus(_strided(x))


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x times a factor; x itself if it is 1."""
    return x if factor == 1.0 else x * factor


def _strided(x: Tensor) -> Tensor:
    return torch.stack((x, x), -1)[..., 0]
