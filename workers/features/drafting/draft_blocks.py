"""DraftBlocks: which tokens of each KV block have keys and values of the draft model.

Blocks are given to rows with the model's keys and values in them, or empty. Those of the draft model may be missing in
either, since it computes only the tokens before its drafts.
"""

from __future__ import annotations

import numpy as np

from ....ipc.messages.workers import SchedulerOutput
from ...machine.arrays import I32, ids_of

_UNKNOWN = -1


class DraftBlocks:
    """Owner of the record, by block of the first KV group, and of its sums by row."""

    def __init__(self, num_blocks: int, max_num_seqs: int, block_size: int, num_groups: int) -> None:
        """num_groups: of the engine's model, their slots take turns in an arena."""
        self._block_size, self._num_groups = block_size, num_groups
        self._num_valid: I32 = np.zeros(num_blocks, np.int32)  # tokens at the begin of each block that are there
        self._of_row: I32 = np.full(max_num_seqs, _UNKNOWN, np.int32)  # likewise of each row
        self._num_blocks: I32 = np.zeros(max_num_seqs, np.int32)  # of each row
        self._num_found: I32 = np.zeros(max_num_seqs, np.int32)  # tokens that a row's blocks had when it was admitted

    def update(self, step: SchedulerOutput) -> list[int]:
        """Apply a step's changes of blocks; return the rows with new requests."""
        new = [each.row for each in step.new_rows]
        for each in step.new_rows:
            self._of_row[each.row], self._num_blocks[each.row] = _UNKNOWN, 0
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
        """Forget the sums by row. The blocks keep their content."""
        self._of_row[:] = _UNKNOWN

    def num_valid(self, row: int, block_ids: I32, most: int) -> int:
        """Return how many tokens at the begin of a row are there, at most `most`. block_ids: [blocks] of the row, at
        least those of `most` tokens."""
        if self._of_row[row] == _UNKNOWN:
            counts = self._num_valid[block_ids[: -(-most // self._block_size)]]
            partial = np.flatnonzero(counts < self._block_size)
            whole = int(partial[0]) if len(partial) else len(counts)
            rest = int(counts[whole]) if len(partial) else 0
            self._of_row[row] = whole * self._block_size + rest
        return min(int(self._of_row[row]), most)

    def note(self, row: int, block_ids: I32, end: int) -> None:
        """Record that the first `end` tokens of a row are there now, and none after them."""
        first = max(int(self._of_row[row]), 0) // self._block_size
        last = -(-end // self._block_size)
        filled = np.minimum(end - np.arange(first, last) * self._block_size, self._block_size)
        self._num_valid[block_ids[first:last]] = filled
        self._of_row[row] = end
