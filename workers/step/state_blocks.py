"""StateBlocks: the block with the state of each of a worker's rows, and the segments of a step.

    step of row r           tokens s … m−1    m … e−1        with the moves (m, b): b is the row's block afterwards
    segment                 reads a           reads a
                            writes a          writes b       a keeps the state at m

A row updates its block in place until it moves. Trusts no message: whatever would read another state than the row's
own, or overwrite one that another row reads, raises ProtocolError before anything is written. Knows no layers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...ipc.errors import ProtocolError
from ..machine.arrays import I32, I64, Bools
from .step_inputs import StateInputs
from .step_layout import StepLayout

_NONE = 0  # the null block: the row has no state yet
_UNKNOWN = -1  # where the state in a block ends, if no row has written it
_LOADED = -2  # likewise, if it was copied from a slot: where the first row that finds it says


class _Segments(NamedTuple):
    """Segments of a step, in the order of its tokens."""

    rows: I32  # [G]
    writes: I32  # [G]; -1: none
    ends: I64  # [G] position in the row at which each ends


class StateBlocks:
    """Owner of the rows' blocks, and of the positions at which the states in all blocks end."""

    def __init__(self, max_num_seqs: int, group: int, num_blocks: int) -> None:
        """group: the number of the KV group; num_blocks: of its blocks, the null block included."""
        self._group, self._num_blocks = group, num_blocks
        self._live: I32 = np.zeros(max_num_seqs, np.int32)
        self._is_found = np.zeros(max_num_seqs, np.bool_)  # the block is a snapshot, which the row must not write
        self._ends: I64 = np.full(num_blocks, _UNKNOWN, np.int64)
        self._writer: I64 = np.full(num_blocks, -1, np.int64)  # scratch: by block
        self._moves: I32 = np.empty((0, 4), np.int32)  # of the step
        self._segments: _Segments | None = None  # likewise
        self.highest_block = 0  # that any row has ever had

    def clear_row(self, row: int) -> None:
        """Forget the state of a row, for the next request in it."""
        self._live[row], self._is_found[row] = _NONE, False

    def are_own(self, slots: I32) -> Bools:
        """Return whether slots [m] have blocks of this group, the last of all."""
        is_own: Bools = slots % (self._group + 1) == self._group
        return is_own

    def load(self, blocks: I32) -> None:
        """Record that blocks were copied from slots."""
        self._ends[blocks] = _LOADED

    def move(self, moves: I32, rows: I32, num_computed: I64) -> None:
        """Record the moves of a step. moves: [m, 4] row, group, position, block, as in SchedulerOutput; rows: [n] of
        the step; num_computed: [max_num_seqs] tokens of each row before its next."""
        self._moves, self._segments = moves, None
        if not len(moves):
            return
        of_rows, groups, positions, blocks = moves.T
        is_valid = np.isin(of_rows, rows) & (groups == self._group) & (blocks > 0) & (blocks < self._num_blocks)
        is_valid &= positions >= 0
        if not is_valid.all():
            row, group, position, block = moves[int(is_valid.argmin())].tolist()
            raise ProtocolError(
                f"the state of row {row} moves to block {block} of KV group {group} at token {position}: the step has "
                f"the rows {rows.tolist()}, and states are in group {self._group}, blocks [1, {self._num_blocks})"
            )
        is_found = (positions == 0) & (num_computed[of_rows] > 0)
        for row, _, _, block in moves[is_found].tolist():
            if self._ends[block] == _LOADED:
                self._ends[block] = num_computed[row]
            if self._live[row] != _NONE or self._ends[block] != num_computed[row]:
                raise ProtocolError(
                    f"row {row} finds the state after {num_computed[row]} tokens in block {block}, which has that "
                    f"after {self._ends[block]}; its own is in block {self._live[row]}"
                )
            self._live[row], self._is_found[row] = block, True
        self._moves = moves[~is_found]
        self.highest_block = max(self.highest_block, int(blocks.max()))

    def of_step(self, layout: StepLayout, firsts: I64, is_withheld: Bools | None) -> StateInputs:
        """Return the segments of a step; change nothing. firsts: [n] position of each row's first token; is_withheld:
        [n] rows whose state the step reads and does not update; None: none."""
        rows, num_rows = layout.rows, len(layout.rows)
        blocks, indices = self._live[rows], np.arange(num_rows)
        starts: I64 = layout.query_starts[:-1].astype(np.int64)
        self._check_continued(rows, blocks, firsts)
        reads = blocks
        is_moved = np.zeros(num_rows, np.bool_)  # at its first token: the block of before is only read
        if len(self._moves):
            index_of = np.zeros(len(self._live), np.int64)
            index_of[rows] = indices
            of_moves = index_of[self._moves[:, 0]]
            offsets = self._moves[:, 2] - firsts[of_moves]
            self._check_moves(layout, offsets, of_moves, is_withheld)
            is_moved[of_moves[offsets == 0]] = True
            # The segments of a row behind each other, first the one in the block of before.
            indices = np.concatenate([indices, of_moves])
            starts = np.concatenate([starts, starts[of_moves] + offsets])
            blocks = np.concatenate([blocks, self._moves[:, 3]])
            order = np.argsort(2 * starts + (np.arange(len(starts)) >= num_rows), kind="stable")
            indices, starts, blocks, is_move = indices[order], starts[order], blocks[order], order >= num_rows
            reads = np.where(is_move, np.roll(blocks, 1), blocks)
            is_kept = is_move | ~is_moved[indices]
            indices, starts, blocks, reads = indices[is_kept], starts[is_kept], blocks[is_kept], reads[is_kept]
        writes = blocks
        cannot_write = ~is_moved & (self._is_found[rows] | (self._live[rows] == _NONE))
        if is_withheld is not None:
            cannot_write &= ~is_withheld
            writes = np.where(is_withheld[indices], -1, blocks)
        if cannot_write.any():
            row = rows[int(cannot_write.argmax())]
            raise ProtocolError(f"row {row} has no block for its state: it found block {self._live[row]}, or none")
        reads = np.where(reads == _NONE, -1, reads)
        self._check_apart(rows, indices, reads, writes)
        ends = np.append(starts[1:], layout.query_starts[-1])
        positions = ends - layout.query_starts[indices] + firsts[indices]
        self._segments = _Segments(rows[indices], writes, positions)
        return StateInputs(np.append(starts, layout.query_starts[-1]).astype(np.int32), reads, writes)

    def advance(self) -> None:
        """Record that the step of `of_step` was computed."""
        assert self._segments is not None, "a step was prepared"
        is_written = self._segments.writes >= 0
        rows, blocks = self._segments.rows[is_written], self._segments.writes[is_written]
        self._ends[blocks] = self._segments.ends[is_written]
        self._live[rows] = blocks  # of a row's segments the last one counts
        self._is_found[rows] = False
        self._moves, self._segments = self._moves[:0], None

    def _check_continued(self, rows: I32, blocks: I32, firsts: I64) -> None:
        """Check that each row continues where its state ends."""
        is_right = np.where(blocks == _NONE, firsts == 0, self._ends[blocks] == firsts)
        if not is_right.all():
            i = int(is_right.argmin())
            raise ProtocolError(
                f"row {rows[i]} continues at token {firsts[i]}, its state in block {blocks[i]} ends at "
                f"{self._ends[blocks[i]]}"
            )

    def _check_moves(self, layout: StepLayout, offsets: I64, of_moves: I64, is_withheld: Bools | None) -> None:
        is_inside = (offsets >= 0) & (offsets < layout.counts[of_moves])
        is_inside[1:] &= (of_moves[1:] != of_moves[:-1]) | (offsets[1:] > offsets[:-1])
        if is_withheld is not None:
            is_inside &= ~is_withheld[of_moves]
        if not is_inside.all():
            row, _, position, block = self._moves[int(is_inside.argmin())].tolist()
            index = of_moves[int(is_inside.argmin())]
            raise ProtocolError(
                f"the state of row {row} moves to block {block} at token {position}, outside the {layout.counts[index]}"
                " tokens of the step, twice, or beside drafts"
            )

    def _check_apart(self, rows: I32, indices: I64, reads: I32, writes: I32) -> None:
        """Check that no row writes a block that another row of the step reads or writes."""
        is_written = writes >= 0
        written, writers = writes[is_written], indices[is_written]
        self._writer[written] = writers
        is_wrong = self._writer[written] != writers
        others = np.where(reads >= 0, self._writer[reads], -1)
        is_read = (others >= 0) & (others != indices)
        self._writer[written] = -1
        if is_wrong.any() or is_read.any():
            found = written[is_wrong].tolist() + reads[is_read].tolist()
            raise ProtocolError(
                f"blocks {found} are written by one of the rows {rows.tolist()} and used by another one"
            )
