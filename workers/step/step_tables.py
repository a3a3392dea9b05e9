"""StepTables: the blocks of an encoder's rows, which they have for one step alone.

Each step uses the pool from its start: every row begins in a block of its own. All tokens of a row are computed in the
same step and see each other, so that no row holds blocks between steps. Has the verbs of GroupTables.
"""

from __future__ import annotations

import numpy as np

from ...ipc.errors import ProtocolError
from ..machine.arrays import I32, I64
from .step_inputs import GroupInputs


class StepTables:
    """Divider of the pool among the rows of a step."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_blocks: int) -> None:
        """num_blocks: of the pool, the null block included."""
        self._block_size = block_size
        self._num_blocks = num_blocks
        self.highest_blocks: I32 = np.zeros(1, np.int32)
        self.num_slots: I64 = np.full(max_num_seqs, max_model_len, np.int64)

    def clear_row(self, row: int) -> None:
        """Do nothing: a new row has no blocks."""

    def forget_step(self) -> None:
        """Do nothing: nothing is kept from the last step."""

    def change(self, appends: I32, frees: I32, num_computed: I64) -> None:
        """Raise ProtocolError if the core gives blocks to rows, or takes them away."""
        if len(appends) or len(frees):
            raise ProtocolError(
                f"{len(appends)} blocks are appended and {len(frees)} freed, rows of encoders have none"
            )

    def of_step(self, rows: I32, token_rows: I32, positions: I64) -> list[GroupInputs]:
        """Return slots and block tables of a step. rows: [n]; token_rows and positions: [T] row and position of each
        token. ProtocolError if a row begins behind its first token, or the pool is too small."""
        starts = np.flatnonzero(positions == 0)
        counts = np.diff(starts, append=len(positions))
        is_whole = len(starts) == len(rows)
        if is_whole:
            is_whole = np.array_equal(positions, np.arange(len(positions)) - np.repeat(starts, counts))
        if not is_whole:
            raise ProtocolError(f"{len(rows)} rows of an encoder are computed, {len(starts)} from their first token on")
        num_blocks = -(-counts // self._block_size)
        ends = 1 + np.cumsum(num_blocks)
        if ends[-1] > self._num_blocks:
            raise ProtocolError(f"{ends[-1] - 1} blocks are needed for a step, the pool has {self._num_blocks - 1}")
        self.highest_blocks[0] = max(self.highest_blocks[0], ends[-1] - 1)
        firsts = ends - num_blocks
        tables = firsts[:, None] + np.arange(num_blocks.max())
        tables[tables >= ends[:, None]] = 0
        slots = np.repeat(firsts * self._block_size, counts) + positions
        see_until = np.repeat(counts - 1, counts)
        return [GroupInputs(slots, tables.astype(np.int32), see_until=see_until.astype(np.int32))]
