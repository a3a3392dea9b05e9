"""StateMoves: plans, for each row of the step that is being made, in which blocks its state goes on.

A plan is made when a row's tables grow for the step, changed if the row gets drafts, and sent with the step. Blocks
that rows leave are freed once it is sent.
"""

from __future__ import annotations

from ...kv.manager import KVCacheManager
from ...kv.state_table import Moves, StateTable
from ...request import Request
from .rows import Rows


class StateMoves:
    """Owner of the plans for the step that is being made. Plans of rows that are freed meanwhile are void."""

    def __init__(self, rows: Rows, kv_cache: KVCacheManager, group: int) -> None:
        """group: the one of layers that keep a state."""
        self._rows, self._kv_cache, self.group = rows, kv_cache, group
        self._planned: list[tuple[int, StateTable]] = []  # by row

    def _table(self, request: Request) -> StateTable:
        table = request.tables[self.group]
        assert isinstance(table, StateTable)
        return table

    def positions(self, request: Request, end: int) -> list[int]:
        """Return the tokens from which on the request's state goes on in new blocks, if its next tokens up to `end` are
        computed. Those that only leave a snapshot get none of the blocks that other rows need in the step."""
        table, start = self._table(request), int(self._rows.num_scheduled[request.row])
        has_to_move = table.has_to_move()
        snapshots = table.boundaries_in(start, end)
        if not has_to_move and table.is_snapshot(start):
            snapshots.insert(0, start)
        if snapshots:
            num_spare = self._num_spare(len(snapshots) + has_to_move) - has_to_move
            snapshots = snapshots[len(snapshots) - max(num_spare, 0) :]
        return [start, *snapshots] if has_to_move else snapshots

    def _num_spare(self, most: int) -> int:
        """Return how many blocks of states, at most `most`, are free besides a block of each other group for each
        row."""
        counts = [self._rows.num_active] * len(self._kv_cache.groups)
        for count in range(most, 0, -1):
            counts[self.group] = count
            if self._kv_cache.memory.num_missing(counts) <= 0:
                return count
        return 0

    def plan(self, request: Request, end: int, positions: list[int], blocks: list[int]) -> None:
        """Let the state of a request go on in `blocks` from these positions on, in a step that computes its next tokens
        up to `end`."""
        table = self._table(request)
        start = int(self._rows.num_scheduled[request.row])
        table.plan(start, end, list(zip(positions, blocks, strict=True)))
        self._planned.append((request.row, table))

    def withhold(self, request: Request) -> None:
        """Let the step that is being made read the state of a request and not update it."""
        table = self._table(request)
        table.cancel()
        self._planned.append((request.row, table))

    def enter(self) -> list[tuple[int, Moves]]:
        """Return the moves of rows, by row, for the message of the step, which is going to be sent."""
        return [(row, table.enter()) for row, table in self._planned]

    def release(self) -> None:
        """Free the blocks that rows have left in the step that was sent."""
        for _, table in self._planned:
            self._kv_cache.num_snapshots.update(table.release())
        self._planned.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError unless each running request holds the state after the tokens that are sent."""
        for request in self._rows.requests():
            num_sent = int(self._rows.num_scheduled[request.row] - self._rows.num_withheld[request.row])
            self._table(request).check_invariants(num_sent)
