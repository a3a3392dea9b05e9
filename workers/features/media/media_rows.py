"""MediaRows: the media of all rows, and their part in the inputs of a step.

A step in which no row computes tokens of spans costs two array operations; one without rows with media costs nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....ipc.errors import ProtocolError
from ....ipc.messages.workers import NewRow
from ....ipc.spec.models.model_config import Encoder as EncoderConfig
from ...machine.arrays import I32, I64
from ...step.step_inputs import StepInputs
from .row_spans import RowSpans


class Piece(NamedTuple):
    """Embeddings [first, first + num_embeds) of an entry."""

    entry: int
    first: int
    num_embeds: int


class MediaPlan(NamedTuple):
    """The changes that media make to the inputs of a step with T tokens."""

    positions: I64 | None = None  # [T], or [3, T]: times, rows and columns; None: those of text
    tokens: I64 | None = None  # [m] indices of placeholders among the T tokens; None: none
    pieces: tuple[Piece, ...] = ()  # their embeddings, in this order
    see_until: I32 | None = None  # [T] last index that a token sees; None: its own
    is_behind_spans: bool = False  # all rows compute tokens behind their last spans


class MediaRows:
    """Owner of the spans of the rows that have any."""

    def __init__(self, max_num_seqs: int, encoder: EncoderConfig, axes_merge: int | None = None) -> None:
        """axes_merge: the merge size of images, if positions are times, rows and columns; None: they are indices."""
        self._encoder, self._axes_merge = encoder, axes_merge
        self._rows = dict[int, RowSpans]()
        self._ends: I64 = np.zeros(max_num_seqs, np.int64)  # index behind the last span
        self.shifts: I64 = np.zeros(max_num_seqs, np.int64)  # from index to position, behind the last span

    def admit(self, new_row: NewRow) -> None:
        """Record the spans of a new row, if it has any."""
        if not new_row.spans:
            return
        spans = RowSpans(new_row, self._encoder.placeholder_id, self._axes_merge)
        self._rows[new_row.row] = spans
        self._ends[new_row.row], self.shifts[new_row.row] = spans.end, spans.shift

    def free(self, rows: I32) -> None:
        for row in rows.tolist() if self._rows else ():
            self._rows.pop(row, None)
        self._ends[rows] = self.shifts[rows] = 0

    def clear(self) -> None:
        self._rows.clear()
        self._ends[:] = self.shifts[:] = 0

    def bind(self, bindings: I32) -> None:
        """Bind spans to entries. bindings: [m, 3] row, index of the span, entry. ProtocolError if there is no such
        span."""
        for row, index, entry in bindings.tolist():
            spans = self._rows.get(row)
            if spans is None or not 0 <= index < len(spans.entries) or entry < 1:
                raise ProtocolError(f"entry {entry} is bound to span {index} of row {row}, which has no such span")
            spans.entries[index] = entry

    def plan(self, inputs: StepInputs) -> MediaPlan | None:
        """Return the changes that media make to a step; None if there are none. ProtocolError if a placeholder has no
        entry."""
        if not self._rows:
            return None
        firsts, rows = inputs.positions[inputs.query_starts[:-1]], inputs.rows
        shifts = self.shifts[rows]
        in_spans = np.flatnonzero(firsts < self._ends[rows])
        positions: I64 | None = None
        if shifts.any():
            positions = inputs.positions + np.repeat(shifts, np.diff(inputs.query_starts))
        if not len(in_spans):
            return None if positions is None else MediaPlan(positions, is_behind_spans=True)
        return self._plan_spans(inputs, firsts, in_spans, positions)

    def _plan_spans(self, inputs: StepInputs, firsts: I64, in_spans: I64, positions: I64 | None) -> MediaPlan:
        """Return the plan of a step. in_spans: the indices of rows whose first token in it is not after their last
        span. firsts: the position of each row's first token."""
        tokens, pieces, starts = list[I64](), list[Piece](), inputs.query_starts.tolist()
        axes: I64 | None = None
        if self._axes_merge is not None:
            axes = np.tile(inputs.positions if positions is None else positions, (3, 1))
        see_until = inputs.positions.astype(np.int32) if self._encoder.is_bidirectional else None
        for i in in_spans.tolist():
            row, begin, first = int(inputs.rows[i]), starts[i], int(firsts[i])
            spans, end = self._rows[row], first + starts[i + 1] - begin
            indices, span_of, embeds = spans.placeholders(first, end)
            pieces += _pieces_of(row, spans, span_of, embeds)
            tokens.append(indices - first + begin)
            if axes is not None:
                axes[:, begin : starts[i + 1]] = spans.positions(first, end)
            if see_until is not None:
                see_until[begin : starts[i + 1]] = spans.see_until(first, end)
        if not pieces:  # all these tokens are before a span, or between two
            return MediaPlan(None if axes is None else axes[0])
        return MediaPlan(axes, np.concatenate(tokens), tuple(pieces), see_until)


def _pieces_of(row: int, spans: RowSpans, span_of: I64, embeds: I64) -> list[Piece]:
    """Return the pieces of a row's placeholders, which are consecutive."""
    pieces = []
    for span in np.unique(span_of).tolist():
        chosen = embeds[span_of == span]
        entry = int(spans.entries[span])
        if not entry:
            raise ProtocolError(f"row {row} computes tokens of its medium {span}, which has no entry yet")
        pieces.append(Piece(entry, int(chosen[0]), len(chosen)))
    return pieces
