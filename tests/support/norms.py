"""Norms of the kernels' contract from plain weights."""

from __future__ import annotations

from torch import Tensor

from tokenloom.kernels.contract import HeadNorms, Norm


def rms(weight: Tensor, eps: float) -> Norm:
    return Norm("rms", weight.float(), None, eps)


def head_norms(weights: tuple[Tensor, Tensor] | None, eps: float) -> HeadNorms | None:
    """Return RMS norms of query and key heads with these weights [D]."""
    return None if weights is None else HeadNorms(rms(weights[0], eps), rms(weights[1], eps))
