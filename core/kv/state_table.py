"""StateTable: the blocks of a running request in the group of layers that keep a state.

    tokens       0 … B−1   B … 2B−1   2B … 3B−1
    table            -          a          b        a: the state after token 2B−1, a snapshot; b: the live block

A row updates its live block in place. Where the state is to stay as it is, at the end of a block, the row goes on in a
new block, and the former one is a snapshot, which requests with the same prefix find by the block's key. Nothing is
copied: a row that moves reads the former block once more. Rows of a step are computed side by side, so that what a row
reads in a step is overwritten in the next one at the earliest.

A step that verifies drafts reads the state and does not update it, since a state cannot be taken back. Knows no rows
and no messages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TypeAlias

from .block_pool import NULL_BLOCK, BlockPool

Moves: TypeAlias = list[tuple[int, int]]  # position, block: tokens from the position on update the block


class StateTable:
    """Table in a group whose layers keep a state. Invariant: between two steps it holds the live block and no other,
    at the entry of the row's last computed token; before the first step, that of a hit or none."""

    has_appends = False
    num_left = 0

    def __init__(self, pool: BlockPool, block_size: int, kept: Sequence[int], *, is_sharing: bool) -> None:
        """kept: boundaries, in blocks and ascending order, at which other requests are likely to begin. is_sharing:
        other requests may find the row's snapshots; if not, it leaves none."""
        self._pool = pool
        self.cache_block = pool.cache_block
        self._block_size = block_size
        self._kept = kept
        self._is_sharing = is_sharing
        self.block_ids: list[int] = []
        self._live = NULL_BLOCK
        self._entry = -1  # of the live block
        self._is_found = False  # the live block is the snapshot that a hit has found: it must not be written
        self._is_sent = False  # the workers know that snapshot
        self._end = 0  # of the step that is being made
        self._moves: Moves = []  # in that step
        # Entries of blocks that the row reads in the step and then leaves, each with whether the row has written it:
        self._left: list[tuple[int, bool]] = []
        self._newest: tuple[int, bytes] | None = None  # block and key of the newest snapshot, if it is not a kept one

    @property
    def held(self) -> Sequence[int]:
        return [block for block in (self._live, *(block for _, block in self._moves)) if block != NULL_BLOCK]

    def take(self, end: int, blocks: Sequence[int]) -> None:
        assert not self.block_ids and len(blocks) == min(end, 1)
        self.block_ids = [NULL_BLOCK] * (end - len(blocks)) + list(blocks)
        if blocks:
            self._live, self._entry, self._is_found = blocks[0], end - 1, True

    def leave(self, first: int) -> None:
        pass

    def is_kept(self, i: int) -> bool:
        boundary = i + 1
        place = bisect_left(self._kept, boundary)
        return place < len(self._kept) and self._kept[place] == boundary

    def free(self) -> None:
        self._pool.free(reversed(self.held))
        self._live, self._is_found, self._end, self._moves = NULL_BLOCK, False, 0, []

    # ── a step is made ───────────────────────────────────────────────────────────────────────────────────────────

    def has_to_move(self) -> bool:
        """Return whether a step that updates the state needs a new block: for the first tokens, behind a hit, and if
        other rows go on from the live block."""
        return self._live == NULL_BLOCK or self._is_found or self._pool.ref_count(self._live) > 1

    def is_snapshot(self, start: int) -> bool:
        """Return whether the live block, which has the state after token `start` - 1, is worth to be left as it is."""
        return self._is_sharing and start % self._block_size == 0

    def boundaries_in(self, start: int, end: int) -> list[int]:
        """Return the tokens behind `start` and before `end` at which a snapshot is worth a block: kept boundaries, and
        the last one, unless the next step begins at one."""
        size = self._block_size
        first, last = start // size + 1, (end - 1) // size
        if not self._is_sharing or first > last:
            return []
        found = list(self._kept[bisect_left(self._kept, first) : bisect_right(self._kept, last)])
        if end % size and (not found or found[-1] < last):
            found.append(last)
        return [boundary * size for boundary in found]

    def plan(self, start: int, end: int, moves: Moves) -> None:
        """Move in the step that is being made, which computes the row's next tokens `start` to `end`. The table must
        have an entry for each. A live block that is not left at `start` is overwritten: requests find it no more."""
        assert not self._moves, "a row is planned twice in a step"
        if self._live != NULL_BLOCK and (not moves or moves[0][0] > start):
            self._pool.forget((self._live,))
        self._end, self._moves = end, moves

    def cancel(self) -> None:
        """Move to no block in the step that is being made, and free those that were planned: the step reads the state
        and does not update it."""
        self._pool.free(block for _, block in self._moves)
        self._end, self._moves = 0, []

    def enter(self) -> Moves:
        """Apply the plan, since the step is going to be sent, and return the moves for its message."""
        sent = list(self._moves)
        if self._is_found and not self._is_sent:
            sent.insert(0, (0, self._live))
            self._is_sent = True
        for position, block in self._moves:
            if self._live != NULL_BLOCK:
                self._place(position // self._block_size - 1)
                self._left.append((self._entry, not self._is_found))
            self._live, self._entry, self._is_found = block, -1, False
        if self._end:
            self._place((self._end - 1) // self._block_size)
        self._end, self._moves = 0, []
        return sent

    def _place(self, entry: int) -> None:
        """Make the live block the one of this entry: after the step it has the state behind tokens of that block."""
        if self._entry != entry:
            if self._entry >= 0:
                self.block_ids[self._entry] = NULL_BLOCK
            self.block_ids[entry], self._entry = self._live, entry

    def release(self) -> list[str]:
        """Free the blocks that the row has left in the step that was sent: later steps may overwrite them. A snapshot
        is demoted once the row has a newer one, unless its boundary is kept. Return for each new snapshot why the row
        has left it: "kept" as others are likely to begin at its boundary, or "newest" as the last one of the row."""
        reasons = []
        for entry, is_new in self._left:
            block, self.block_ids[entry] = self.block_ids[entry], NULL_BLOCK
            key = self._pool.key_of(block)
            self._pool.free((block,))
            if self._newest is not None and self._pool.holds(*self._newest):
                self._pool.demote((self._newest[0],))
            is_kept = self.is_kept(entry)
            self._newest = None if key is None or is_kept else (block, key)
            if is_new and key is not None:
                reasons.append("kept" if is_kept else "newest")
        self._left.clear()
        return reasons

    # ── for tests ────────────────────────────────────────────────────────────────────────────────────────────────

    def check_invariants(self, num_computed: int) -> None:
        """Raise AssertionError unless the table has the state after the row's first `num_computed` tokens."""
        assert not self._moves and not self._left, "a step was planned and not sent"
        entry = (num_computed - 1) // self._block_size
        expected = {entry: self._live} if num_computed else {}
        assert {i: block for i, block in enumerate(self.block_ids) if block != NULL_BLOCK} == expected, "other blocks"
        assert (self._live != NULL_BLOCK) == (num_computed > 0)
