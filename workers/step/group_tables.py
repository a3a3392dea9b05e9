"""GroupTables: the block tables of a worker's rows, one for each KV group.

Entry i of a table is the block of the tokens [i * block_size, (i + 1) * block_size) of its row. Where layers see a
window of tokens only, blocks that lie wholly behind the window of a row's next token are the null block, 0: from the
begin in a row that is admitted behind cached tokens, or once the core has freed them.

Trusts no message: whatever the tables do not allow raises ProtocolError, and the tables stay as they were. Knows
neither tokens nor layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...ipc.errors import ProtocolError
from ..machine.arrays import I32, I64, Bools
from .step_inputs import GroupInputs

NO_FREES: I32 = np.empty((0, 3), np.int32)
_NO_WINDOW = 1 << 40  # more tokens than a row has: no block lies behind such a window


class _Growth(NamedTuple):
    """Blocks to append, sorted by table."""

    tables: I64  # [m] index of each block's table
    columns: I64  # [m] the entry that it becomes
    block_ids: I32  # [m]
    num_blocks: I64  # [all tables] entries afterwards


class GroupTables:
    """Owner of the tables. That of row r in group g has the index g * max_num_seqs + r."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_blocks: Sequence[int],
        windows: Sequence[int | None],
    ) -> None:
        """num_blocks: of each group, the null block included. windows: tokens that the layers of each group see, the
        token itself included; None: all."""
        self._num_groups = len(num_blocks)
        self._num_rows = max_num_seqs
        self._block_size = block_size
        self._has_window = [window is not None for window in windows]
        self._windows: I64 = np.array([window or _NO_WINDOW for window in windows], np.int64)
        self._limits: I64 = np.array(num_blocks, np.int64)
        self._least_limit = min(num_blocks)
        # That any row has ever had, by group: pools hand blocks out in their order at first.
        self.highest_blocks: I32 = np.zeros(len(num_blocks), np.int32)
        self._max_tokens = max_model_len
        num_tables = len(num_blocks) * max_num_seqs
        self._block_ids: I32 = np.zeros((num_tables, -(-max_model_len // block_size)), np.int32)
        self._by_group = np.split(self._block_ids, len(num_blocks))  # [max_num_seqs, width] each; views
        self._num_blocks: I64 = np.zeros(num_tables, np.int64)
        self._num_freed: I64 = np.zeros(num_tables, np.int64)
        self.num_slots: I64 = np.zeros(max_num_seqs, np.int64)  # tokens that the blocks of each row hold in all groups
        self._of_step: list[tuple[I32, I64 | None]] | None = None  # tables of the last step's rows, freed entries

    @property
    def first(self) -> I32:
        """The block tables of the first group, which change in place: [max_num_seqs, most blocks of a row]."""
        return self._by_group[0]

    def clear_row(self, row: int) -> None:
        """Empty the tables of a row, for the next request in it."""
        for table in range(row, len(self._num_blocks), self._num_rows):
            self._block_ids[table, : self._num_blocks[table]] = 0
            self._num_blocks[table] = self._num_freed[table] = 0
        self.num_slots[row] = 0

    def forget_step(self) -> None:
        """Forget the rows of the last step: `of_step` is called with others next."""
        self._of_step = None

    def change(self, appends: I32, frees: I32, num_computed: I64) -> None:
        """Append blocks, then put the null block in place of freed ones.

        appends: [m, 3] row, group, block id, in table order for each row and group; id 0 only behind a window. frees:
        [k, 3] row, group, n: the first n entries of that table are freed, in tables that get blocks in `appends`. Rows
        must be valid. num_computed: [max_num_seqs] tokens of each row before its next.
        """
        if not len(appends) and not len(frees):
            return
        growth = self._checked_growth(appends, num_computed)
        freed = self._checked_frees(frees, growth, num_computed)
        self._block_ids[growth.tables, growth.columns] = growth.block_ids
        np.maximum.at(self.highest_blocks, appends[:, 1], appends[:, 2])
        self._num_blocks = growth.num_blocks
        for table, count in zip(freed.tolist(), frees[:, 2].tolist(), strict=True):
            self._block_ids[table, :count] = 0
            self._num_freed[table] = count
        rows = growth.tables
        fewest = self._num_blocks
        if self._num_groups > 1:
            rows = rows % self._num_rows
            fewest = fewest.reshape(self._num_groups, -1).min(axis=0)
        self.num_slots[rows] = np.minimum(fewest[rows] * self._block_size, self._max_tokens)
        self._of_step = None

    def of_step(self, rows: I32, token_rows: I32, positions: I64) -> list[GroupInputs]:
        """Return slots and block tables of a step by group. rows: [n]; token_rows and positions: [T] row and position
        of each token, which has a slot. Between two calls of `forget_step` all calls have the same rows."""
        if self._of_step is None:
            self._of_step = [self._tables_of(group, rows) for group in range(self._num_groups)]
        blocks = positions // self._block_size
        return [
            GroupInputs((ids[token_rows, blocks] - blocks) * self._block_size + positions, tables, num_freed)
            for ids, (tables, num_freed) in zip(self._by_group, self._of_step, strict=True)
        ]

    def _tables_of(self, group: int, rows: I32) -> tuple[I32, I64 | None]:
        first = group * self._num_rows
        tables = self._by_group[group][rows, : self._num_blocks[rows + first].max()]
        return tables, self._num_freed[rows + first] if self._has_window[group] else None

    def _checked_growth(self, appends: I32, num_computed: I64) -> _Growth:
        rows, groups, block_ids = appends.T
        tables = self._tables_at(rows, groups, "given blocks")
        counts = np.bincount(tables, minlength=len(self._num_blocks))  # of all tables
        ends = self._num_blocks + counts
        if ends.max() > self._block_ids.shape[1]:
            table = int(ends.argmax())
            raise ProtocolError(
                f"row {table % self._num_rows} is given {ends[table]} blocks, a row has at most "
                f"{self._block_ids.shape[1]}"
            )
        order = np.argsort(tables, kind="stable")
        tables, block_ids = tables[order], block_ids[order]
        columns = np.arange(len(tables)) + (self._num_blocks - np.cumsum(counts) + counts)[tables]
        growth = _Growth(tables, columns, block_ids, ends)
        if len(tables) and (block_ids.min() < 1 or block_ids.max() >= self._least_limit):
            self._check_ids(growth, num_computed)
        return growth

    def _check_ids(self, growth: _Growth, num_computed: I64) -> None:
        groups, rows = np.divmod(growth.tables, self._num_rows)
        is_null = (growth.block_ids == 0) & self._is_behind(growth.columns + 1, groups, num_computed[rows])
        is_wrong = ~is_null & ((growth.block_ids < 1) | (growth.block_ids >= self._limits[groups]))
        if is_wrong.any():
            i = int(is_wrong.argmax())
            raise ProtocolError(
                f"block {growth.block_ids[i]} is appended as entry {growth.columns[i]} of row {rows[i]} in KV group "
                f"{groups[i]}, whose blocks are [1, {self._limits[groups[i]]})"
            )

    def _checked_frees(self, frees: I32, growth: _Growth, num_computed: I64) -> I64:
        """Return the index of the table of each entry in `frees`."""
        if not len(frees):
            return growth.tables[:0]
        rows, groups, counts = frees.T
        tables = self._tables_at(rows, groups, "relieved of blocks")
        is_allowed = (counts > 0) & (counts >= self._num_freed[tables]) & (counts <= growth.num_blocks[tables])
        is_allowed &= self._is_behind(counts.astype(np.int64), groups, num_computed[rows])
        is_allowed &= np.isin(tables, growth.tables)
        if len(np.unique(tables)) < len(tables) or not is_allowed.all():
            i = int(is_allowed.argmin())
            raise ProtocolError(
                f"row {rows[i]} is relieved of its first {counts[i]} blocks in KV group {groups[i]}: of "
                f"{growth.num_blocks[tables[i]]} blocks {self._num_freed[tables[i]]} are freed, and "
                f"{num_computed[rows[i]]} tokens are computed; once a step, and only with new blocks"
            )
        return tables

    def _tables_at(self, rows: I32, groups: I32, verb: str) -> I64:
        if not groups.any():
            return rows.astype(np.int64)
        if groups.min() < 0 or groups.max() >= self._num_groups:
            raise ProtocolError(
                f"KV groups {groups.min()} to {groups.max()} are {verb}, groups are [0, {self._num_groups})"
            )
        return groups.astype(np.int64) * self._num_rows + rows

    def _is_behind(self, num_entries: I64, groups: I32 | I64, num_computed: I64) -> Bools:
        """Return whether no token from `num_computed` on sees a token in the first `num_entries` blocks."""
        is_behind: Bools = num_entries * self._block_size + self._windows[groups] - 1 <= num_computed
        return is_behind
