"""Attention of an encoder in torch. Bounds divide the rows into ranges, and each row attends to all rows of its
range."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """Rows [start, stop) of one piece, which attend to the rows [low, high)."""

    start: int
    stop: int
    low: int
    high: int


def parts_of(bounds: list[int], cuts: list[int]) -> list[Part]:
    """Return the parts into which `cuts` and `bounds` divide the rows from cuts[0] to cuts[-1]."""
    parts = []
    for start, stop in pairwise(cuts):
        first = bisect.bisect_right(bounds, start) - 1
        for low, high in pairwise(bounds[first:]):
            if low >= stop:
                break
            parts.append(Part(max(low, start), min(high, stop), low, high))
    return parts


def by_heads(pieces: Sequence[Tensor]) -> Tensor:
    """Join pieces [n, heads, size] into [heads, rows, size]. If there are several, each head is contiguous, as several
    pieces will read it."""
    rows = joined(pieces).transpose(0, 1)
    return rows if len(pieces) == 1 else rows.contiguous()


def attend(scale: float, queries: Tensor, keys: Tensor, values: Tensor, bounds: list[int], start: int) -> Tensor:
    """Compute attention from `queries` [n, heads, size] of the rows [start, start + n) to the keys and values [heads,
    rows, size] of each row's range between bounds: [n, heads × size]."""
    found = []
    for part in parts_of(bounds, [start, start + len(queries)]):
        q = queries[part.start - start : part.stop - start].transpose(0, 1)
        k, v = keys[:, part.low : part.high], values[:, part.low : part.high]
        attended = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], scale=scale)
        found.append(attended[0].transpose(0, 1))
    return joined(found).flatten(1)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the two halves of each head of x [n, heads, size] by the angles of its row."""
    wide = x.to(cosines.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosines + torch.cat((-second, first), dim=-1) * sines).to(x.dtype)


def joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
