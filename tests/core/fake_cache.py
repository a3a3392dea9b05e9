"""The KV cache of a worker without a model: facts in place of keys, in blocks of several groups over one memory.

A write to a block of one group destroys the facts of other groups in the same bytes. So a table that names a
block of another one, or of a row that goes on, reads something else than the row's own tokens.

A block of a group with a state has the history of all tokens that the state has seen, which is computed anew for each.
Rows of a step are computed side by side: none may write the state that another one reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from tokenloom.ipc.codec import decode_ids
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.workers import SchedulerOutput

STATE = 0  # in place of a window: the group has states
Fact: TypeAlias = tuple[int, bytes]  # token, digest of the history up to it


class FakeCache:
    """Blocks and the tables of rows. windows: by group, the tokens that are seen; None: all; STATE: the group has
    states."""

    def __init__(self, shape: PoolShape, block_size: int, windows: Sequence[int | None] = (None,)) -> None:
        self.shape, self.block_size, self.windows = shape, block_size, windows
        self.states: dict[tuple[int, int], bytes] = {}  # by group and block: the history
        self.live: dict[tuple[int, int], int] = {}  # by row and group: the block with the row's state
        self.moves: dict[tuple[int, int], list[tuple[int, int]]] = {}  # of this step: position, block
        self.read: dict[tuple[int, int], int] = {}  # in this step, by group and block: a row
        self.num_snapshots_read = 0
        self.blocks: dict[tuple[int, int], list[Fact | None]] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.num_left: dict[tuple[int, int], int] = defaultdict(int)
        self.num_groups = len(windows)
        self.most_held = [0] * len(windows)  # blocks of a row

    def add_row(self, row: int) -> None:
        assert row not in self.tables, "a row was admitted twice"
        self.tables[row] = [[] for _ in self.windows]

    def remove_row(self, row: int) -> None:
        for group in range(len(self.windows)):
            self.num_left.pop((row, group), None)
            self.live.pop((row, group), None)
        del self.tables[row]

    def clear_rows(self) -> None:
        self.tables.clear()
        self.num_left.clear()
        self.live.clear()

    def change_tables(self, output: SchedulerOutput, num_computed: dict[int, int]) -> None:
        """Append and free blocks of rows. num_computed: tokens by row before the step."""
        grown = set[tuple[int, int]]()
        self.moves.clear()
        self.read.clear()
        for row, group, position, block in _tuples(output.state_moves, 4):
            assert self.windows[group] == STATE and 0 < block < self.shape.num_blocks(group)
            assert position == 0 or position >= num_computed[row], "a state moves before the step"
            moves = self.moves.setdefault((row, group), [])
            assert not moves or moves[-1][0] < position
            moves.append((position, block))
        for row, group, block in _tuples(output.block_appends, 3):
            assert self.windows[group] != STATE
            table, is_null = self.tables[row][group], block == 0
            assert 0 <= block < self.shape.num_blocks(group) and (not is_null or self.windows[group] is not None)
            assert not is_null or not any(table), "the null block follows others"
            table.append(block)
            grown.add((row, group))
        for row, group, count in _tuples(output.block_frees, 3):
            window, table = self.windows[group], self.tables[row][group]
            assert (row, group) in grown, "blocks leave in a step that appends none"
            assert window is not None and count * self.block_size <= num_computed[row] - window + 1
            assert self.num_left[row, group] <= count <= len(table)
            table[:count] = [0] * count
            self.num_left[row, group] = count
        for row, group in grown:
            held = [block for block in self.tables[row][group] if block]
            assert len({*held}) == len(held), "a block stands twice in a table"
            self.most_held[group] = max(self.most_held[group], len(held))

    def write(self, row: int, position: int, fact: Fact) -> None:
        for group, table in enumerate(self.tables[row]):
            if self.windows[group] == STATE:
                continue
            block = table[position // self.block_size]
            assert block, "the null block is written"
            self._destroy_others(group, block)
            content = self.blocks.setdefault((group, block), [None] * self.block_size)
            content[position % self.block_size] = fact

    def _destroy_others(self, group: int, block: int) -> None:
        sizes = self.shape.block_bytes
        first, end = block * sizes[group], (block + 1) * sizes[group]
        for other, size in enumerate(sizes):
            for each in range(first // size, -(-end // size) if other != group else 0):
                self.blocks.pop((other, each), None)
                self.states.pop((other, each), None)

    def read_states(self, row: int, start: int, history: bytes) -> None:
        """Check that a row's state is that after its first `start` tokens, with this history."""
        for group, window in enumerate(self.windows):
            if window != STATE:
                continue
            moves = self.moves.get((row, group), [])
            if start and moves and moves[0][0] == 0:
                assert (row, group) not in self.live, "a row finds a state, and has one"
                self.live[row, group] = moves.pop(0)[1]
                self.num_snapshots_read += 1
            if start:
                block = self.live[row, group]
                assert self.states.get((group, block)) == history, f"wrong state at {start} in group {group}"
                self.read[group, block] = row
            else:
                assert (row, group) not in self.live

    def write_states(self, row: int, start: int, end: int, history: Callable[[int], bytes]) -> None:
        """Compute a row's states in a step, after all rows have read theirs. history: of the tokens before one."""
        for group, window in enumerate(self.windows):
            if window != STATE:
                continue
            for position, block in [*self.moves.pop((row, group), []), (end, -1)]:
                assert start <= position and (position < end or block < 0), "a state moves outside the step"
                if position > start:
                    self._write_state(row, group, history(position))
                if block >= 0:
                    self.live[row, group] = block

    def _write_state(self, row: int, group: int, history: bytes) -> None:
        block = self.live[row, group]
        assert self.read.get((group, block), row) == row, "a row writes a state that another one reads"
        self._destroy_others(group, block)
        self.states[group, block] = history
        self.read[group, block] = row

    def check(self, row: int, start: int, facts: Sequence[Fact]) -> None:
        """Check the keys that a row reads if it computes its tokens from `start` on; facts: of all its tokens."""
        for table, (group, window) in zip(self.tables[row], enumerate(self.windows), strict=True):
            if window == STATE:
                continue
            for position in range(0 if window is None else max(start - window + 1, 0), len(facts)):
                block = table[position // self.block_size]
                content = self.blocks.get((group, block))
                found = content and block and content[position % self.block_size]
                assert found == facts[position], f"wrong KV at {position} in group {group}"

    def copy_out(self, group: int, block: int) -> tuple[object, ...]:
        """Return the content of a block."""
        assert 0 < block < self.shape.num_blocks(group)
        if self.windows[group] == STATE:
            return (self.states.get((group, block)),)
        return tuple(self.blocks.get((group, block), [None] * self.block_size))

    def copy_in(self, group: int, block: int, content: tuple[object, ...]) -> None:
        assert 0 < block < self.shape.num_blocks(group)
        self._destroy_others(group, block)
        if self.windows[group] == STATE:
            self.states[group, block] = content[0]  # type: ignore[assignment]
            return
        facts = [*content, *[None] * self.block_size][: self.block_size]
        self.blocks[group, block] = facts  # type: ignore[assignment]


def _tuples(frame: bytes, width: int) -> Iterator[tuple[int, ...]]:
    ids = decode_ids(frame)
    return zip(*(ids[i::width] for i in range(width)), strict=True)
