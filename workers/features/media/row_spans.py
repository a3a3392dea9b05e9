"""RowSpans: the media in the prompt of one row, and the positions of its tokens.

In models with a rotary embedding by time, row and column (Qwen's), an image of h × w patches takes max(h, w) / m
positions, m being the merge size, and h × w / m² tokens: later tokens have positions below their indices (as
get_rope_index of transformers). In all others a token's position is its index.
"""

from __future__ import annotations

import numpy as np

from ....ipc.errors import ProtocolError
from ....ipc.messages.workers import NewRow
from ...machine.arrays import I32, I64

FIELDS = 5  # of a span: start, length, grid


class RowSpans:
    """Spans [k] of one row by rising starts, its placeholders [m], and the entry that each span is bound to."""

    def __init__(self, new_row: NewRow, placeholder_id: int, axes_merge: int | None) -> None:
        """axes_merge: the merge size of images, if positions are times, rows and columns; None: they are indices.
        ProtocolError if the spans do not fit the prompt."""
        fields = np.frombuffer(new_row.spans, np.int32)
        if len(fields) % FIELDS:
            raise ProtocolError(f"row {new_row.row} is admitted with {len(fields)} numbers of spans, each span has 5")
        spans = fields.reshape(-1, FIELDS).astype(np.int64)
        self._starts: I64 = spans[:, 0]
        self._ends: I64 = spans[:, 0] + spans[:, 1]
        token_ids = np.frombuffer(new_row.token_ids, np.int32)
        bounds = np.ravel((self._starts, self._ends), "F")
        if (np.diff(bounds) < 0).any() or bounds[0] < 0 or bounds[-1] > len(token_ids):
            raise ProtocolError(
                f"row {new_row.row} of {len(token_ids)} tokens is admitted with spans {bounds.tolist()}"
            )
        inside = np.repeat(np.arange(len(spans)), spans[:, 1])
        indices = np.arange(len(inside)) + np.repeat(self._starts - np.cumsum(spans[:, 1]) + spans[:, 1], spans[:, 1])
        is_placeholder = token_ids[indices] == placeholder_id
        self._places: I64 = indices[is_placeholder]
        self._span_of: I64 = inside[is_placeholder]
        first = np.searchsorted(self._span_of, np.arange(len(spans)))
        self._embeds: I64 = np.arange(len(self._places)) - first[self._span_of]  # of each placeholder, in its entry
        self.entries: I32 = np.zeros(len(spans), np.int32)  # 0: not bound
        self._columns: I64 = np.ones(len(spans), np.int64)  # embeddings in a row of the image
        shifts = np.zeros(len(spans) + 1, np.int64)
        if axes_merge is not None:
            rows, self._columns = spans[:, 3] // axes_merge, spans[:, 4] // axes_merge
            if (rows * self._columns != spans[:, 1]).any():
                raise ProtocolError(
                    f"row {new_row.row} is admitted with grids of other numbers of tokens than its spans"
                )
            np.cumsum(np.maximum(rows, self._columns) - spans[:, 1], out=shifts[1:])
        self._shifts = shifts  # from index to position: before the first span, behind the first, …

    @property
    def end(self) -> int:
        """The index after the last token of the last span."""
        return int(self._ends[-1])

    @property
    def shift(self) -> int:
        """The position minus the index of the tokens after the last span."""
        return int(self._shifts[-1])

    def placeholders(self, begin: int, end: int) -> tuple[I64, I64, I64]:
        """Return the placeholders among the tokens [begin, end): their indices, spans, and embeddings in the entry."""
        found = slice(*np.searchsorted(self._places, (begin, end)))
        return self._places[found], self._span_of[found], self._embeds[found]

    def positions(self, begin: int, end: int) -> I64:
        """Return times, rows and columns of the tokens [begin, end): [3, end − begin]."""
        indices = np.arange(begin, end)
        span = np.searchsorted(self._starts, indices, side="right") - 1  # the last that has begun
        is_inside = (span >= 0) & (indices < self._ends[span])
        positions = np.tile(indices + self._shifts[span + 1], (3, 1))
        if is_inside.any():
            inside = span[is_inside]
            begun = self._starts[inside] + self._shifts[inside]
            ordinals = indices[is_inside] - self._starts[inside]
            positions[0, is_inside] = begun
            positions[1, is_inside] = begun + ordinals // self._columns[inside]
            positions[2, is_inside] = begun + ordinals % self._columns[inside]
        return positions

    def see_until(self, begin: int, end: int) -> I64:
        """Return the last index that each of the tokens [begin, end) sees, if those of a span see one another."""
        indices = np.arange(begin, end)
        span = np.searchsorted(self._starts, indices, side="right") - 1
        is_inside = (span >= 0) & (indices < self._ends[span])
        return np.where(is_inside, self._ends[span] - 1, indices)
