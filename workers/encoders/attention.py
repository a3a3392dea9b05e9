"""Attention of an encoder: each row attends to all rows between the same two bounds, by torch or by our kernels.

    keys, values of all rows → gather → attend from some of the rows, piece by piece

Our kernels read keys and values from a paged cache, so they get one: its blocks are as long as they can be if each
range between bounds is to have whole ones. A piece, or its part of a range, is a row of a step, whose tokens all see
until the end of the range. So a piece has the same bits, whether it runs alone or with others in one call.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ...kernels.contract import AttentionMetadata, AttentionSpec
from ...kernels.select import Ops

HEAD_UNIT = 16  # heads are padded to a multiple of these elements, which the kernels for many rows need


class Attention(Protocol):
    """`joins_pieces`: pieces have the same bits if they run in one call."""

    joins_pieces: bool

    def gather(self, keys: Sequence[Tensor], values: Sequence[Tensor], bounds: list[int]) -> Tensor:
        """Lay out the keys and values [n, heads, size] of all pieces for `attend`."""
        ...

    def attend(self, scale: float, queries: Tensor, gathered: Tensor, bounds: list[int], cuts: list[int]) -> Tensor:
        """Attend from consecutive rows; return [n, heads × size]. queries: [n, heads, size] of the rows from cuts[0]
        to cuts[-1], of pieces that end at the other cuts. gathered: with the same `bounds`."""
        ...


class TorchAttention:
    """By torch, which takes other sums for other numbers of rows."""

    joins_pieces = False

    def gather(self, keys: Sequence[Tensor], values: Sequence[Tensor], bounds: list[int]) -> Tensor:
        """[2, heads, rows, size]; each head contiguous if many pieces read it."""
        rows = torch.stack((joined(keys), joined(values))).transpose(1, 2)
        return rows if len(keys) == 1 else rows.contiguous()

    def attend(self, scale: float, queries: Tensor, gathered: Tensor, bounds: list[int], cuts: list[int]) -> Tensor:
        start, found = cuts[0], []
        for part in parts_of(bounds, cuts):
            q = queries[part.start - start : part.stop - start].transpose(0, 1)
            q, k, v = (each.unsqueeze(0) for each in (q, *gathered[:, :, part.low : part.high]))
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
            found.append(attended[0].transpose(0, 1))
        return joined(found).flatten(1)


class KernelAttention:
    """By kernels that take a row's sums alike, whatever else they compute."""

    joins_pieces = True

    def __init__(self, ops: Ops) -> None:
        """ops: not batch-invariant, which would cost a task for each row."""
        self._ops = ops

    def gather(self, keys: Sequence[Tensor], values: Sequence[Tensor], bounds: list[int]) -> Tensor:
        """[blocks, 1, 2, heads, rows of a block, padded size]."""
        rows = math.gcd(*bounds)
        _, num_heads, size = keys[0].shape
        shape = (bounds[-1] // rows, 1, 2, num_heads, rows, padded(size))
        cache = (keys[0].new_zeros if padded(size) > size else keys[0].new_empty)(shape)
        for side, pieces in enumerate((keys, values)):
            blocks = joined(pieces).view(-1, rows, num_heads, size)
            cache[:, 0, side, :, :, :size] = blocks.transpose(1, 2)
        return cache

    def attend(self, scale: float, queries: Tensor, gathered: Tensor, bounds: list[int], cuts: list[int]) -> Tensor:
        num_rows, num_heads, size = queries.shape
        query = torch.nn.functional.pad(queries, (0, padded(size) - size)) if padded(size) > size else queries
        metadata = step_of(parts_of(bounds, cuts), gathered.shape[4])
        attended = self._ops.paged_attention(query, gathered, 0, metadata, AttentionSpec(scale))
        return attended.view(num_rows, num_heads, -1)[:, :, :size].flatten(1)


class Part(NamedTuple):
    """Rows [start, stop) of one piece, which attend to [low, high)."""

    start: int
    stop: int
    low: int
    high: int


def parts_of(bounds: list[int], cuts: list[int]) -> list[Part]:
    """Cut the rows from cuts[0] to cuts[-1] at the other cuts and at bounds."""
    parts = []
    for start, stop in pairwise(cuts):
        first = bisect.bisect_right(bounds, start) - 1
        for low, high in pairwise(bounds[first:]):
            if low >= stop:
                break
            parts.append(Part(max(low, start), min(high, stop), low, high))
    return parts


def step_of(parts: Sequence[Part], block_size: int) -> AttentionMetadata:
    """Return a step whose rows are parts, of which each token sees all keys. It writes no keys and values."""
    starts, stops, lows, highs = np.array(parts, np.int32).T
    counts, lengths = stops - starts, highs - lows
    blocks = (lows // block_size)[:, None] + np.arange(max(lengths) // block_size)
    blocks[blocks >= (highs // block_size)[:, None]] = 0
    query_starts = np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
    no_tokens = torch.empty(0, dtype=torch.int64)
    return AttentionMetadata(
        positions=no_tokens,
        slots=no_tokens,
        query_starts=torch.from_numpy(query_starts),
        seq_lens=torch.from_numpy(lengths),
        block_tables=torch.from_numpy(blocks.astype(np.int32)),
        num_decode_rows=0,
        query_starts_host=query_starts.tolist(),
        seq_lens_host=lengths.tolist(),
        see_until=torch.from_numpy(np.repeat(lengths - 1, counts)),
    )


def padded(size: int) -> int:
    return -(-size // HEAD_UNIT) * HEAD_UNIT


def joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
