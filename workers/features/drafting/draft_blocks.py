"""DraftBlocks: which tokens of each KV block have keys and values of the draft model.

Blocks are given to rows with the model's keys and values in them, or empty. Those of the draft model may be missing in
either, since it computes only the tokens before its drafts. A draft model computes the missing ones. A head cannot: it
needs the model's hidden states, which are not kept for long. It then attends from the begin of a later block on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....ipc.messages.workers import SchedulerOutput
from ...machine.arrays import I32, ids_of

_UNKNOWN = -1


class Span(NamedTuple):
    """Tokens of a row with keys and values."""

    start: int  # the first, with which a block begins
    end: int  # behind the last: the first token to compute


class DraftBlocks:
    """Owner of the record, by block of the first KV group, and of each row's span."""

    def __init__(self, num_blocks: int, max_num_seqs: int, block_size: int, num_groups: int) -> None:
        """num_groups: of the engine's model, their slots take turns in an arena."""
        self._block_size, self._num_groups = block_size, num_groups
        self._num_valid: I32 = np.zeros(num_blocks, np.int32)  # tokens at the begin of each block that are there
        self._starts: I32 = np.zeros(max_num_seqs, np.int32)  # of each row's span, and its end
        self._ends: I32 = np.full(max_num_seqs, _UNKNOWN, np.int32)
        self._num_blocks: I32 = np.zeros(max_num_seqs, np.int32)  # of each row
        self._num_found: I32 = np.zeros(max_num_seqs, np.int32)  # tokens that a row's blocks had when it was admitted

    def update(self, step: SchedulerOutput) -> list[int]:
        """Apply a step's changes of blocks; return the rows with new requests."""
        new = [each.row for each in step.new_rows]
        for each in step.new_rows:
            self._ends[each.row], self._num_blocks[each.row] = _UNKNOWN, 0
            self._num_found[each.row] = each.num_computed_tokens
        if step.loads:
            slots, blocks = ids_of(step.loads).reshape(-1, 2).T
            self._num_valid[blocks[slots % self._num_groups == 0]] = self._block_size
        if step.block_appends:
            rows, groups, blocks = ids_of(step.block_appends).reshape(-1, 3).T
            for row, block in zip(rows[groups == 0].tolist(), blocks[groups == 0].tolist(), strict=True):
                if self._num_blocks[row] * self._block_size >= self._num_found[row]:
                    self._num_valid[block] = 0
                self._num_blocks[row] += 1
        return new

    def forget_rows(self) -> None:
        """Forget the spans. The blocks keep their content."""
        self._ends[:] = _UNKNOWN

    def span(self, row: int, block_ids: I32, most: int, reach: int = 0) -> Span:
        """Return the span of a row in its first `most` tokens. block_ids: [blocks] of the row, at least those of `most`
        and of `reach` tokens. reach: the first of the tokens that can be computed. If tokens before it are missing, the
        span begins behind them; its start is beyond `most` if no later block can be computed whole."""
        if not max(reach, 0) <= self._ends[row]:
            size, place = self._block_size, reach // self._block_size
            counts = self._num_valid[block_ids[: -(-max(most, reach) // size)]]
            place += place < len(counts) and bool(counts[place] < reach % size)
            partial = np.flatnonzero(counts < size)
            before, behind = partial[partial < place], partial[partial >= place]
            start = int(before[-1]) + 1 if len(before) else 0
            whole = int(behind[0]) if len(behind) else max(len(counts), place)
            rest = int(counts[whole]) if len(behind) else 0
            self._starts[row], self._ends[row] = start * size, whole * size + rest
        return Span(int(self._starts[row]), min(int(self._ends[row]), most))

    def note(self, row: int, block_ids: I32, end: int) -> None:
        """Record that the tokens of a row's span are there up to `end`, and none after them."""
        first = int(self._ends[row]) // self._block_size
        last = -(-end // self._block_size)
        filled = np.minimum(end - np.arange(first, last) * self._block_size, self._block_size)
        self._num_valid[block_ids[first:last]] = filled
        self._ends[row] = end
