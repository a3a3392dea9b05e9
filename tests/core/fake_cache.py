"""The KV cache of a worker without a model: facts in place of keys, in blocks of several groups over one memory.

A write to a block of one group destroys the facts of other groups in the same bytes. So a table that names a
block of another one, or of a row that goes on, reads something else than the row's own tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from tokenloom.ipc.codec import decode_ids
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.workers import SchedulerOutput

Fact: TypeAlias = tuple[int, bytes]  # token, digest of the history up to it


class FakeCache:
    """Blocks and the tables of rows. windows: by group, the tokens that are seen; None: all."""

    def __init__(self, shape: PoolShape, block_size: int, windows: Sequence[int | None] = (None,)) -> None:
        self.shape, self.block_size, self.windows = shape, block_size, windows
        self.blocks: dict[tuple[int, int], list[Fact | None]] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.num_left: dict[tuple[int, int], int] = defaultdict(int)
        self.most_held = [0] * len(windows)  # blocks of a row

    def add_row(self, row: int) -> None:
        assert row not in self.tables, "a row was admitted twice"
        self.tables[row] = [[] for _ in self.windows]

    def remove_row(self, row: int) -> None:
        for group in range(len(self.windows)):
            self.num_left.pop((row, group), None)
        del self.tables[row]

    def clear_rows(self) -> None:
        self.tables.clear()
        self.num_left.clear()

    def change_tables(self, output: SchedulerOutput, num_computed: dict[int, int]) -> None:
        """Append and free blocks of rows. num_computed: tokens by row before the step."""
        grown = set[tuple[int, int]]()
        for row, group, block in _triples(output.block_appends):
            table, is_null = self.tables[row][group], block == 0
            assert 0 <= block < self.shape.num_blocks(group) and (not is_null or self.windows[group] is not None)
            assert not is_null or not any(table), "the null block follows others"
            table.append(block)
            grown.add((row, group))
        for row, group, count in _triples(output.block_frees):
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

    def check(self, row: int, start: int, facts: Sequence[Fact]) -> None:
        """Check the keys that a row reads if it computes its tokens from `start` on; facts: of all its tokens."""
        for table, (group, window) in zip(self.tables[row], enumerate(self.windows), strict=True):
            for position in range(0 if window is None else max(start - window + 1, 0), len(facts)):
                block = table[position // self.block_size]
                content = self.blocks.get((group, block))
                found = content and block and content[position % self.block_size]
                assert found == facts[position], f"wrong KV at {position} in group {group}"

    def copy_out(self, block: int) -> tuple[object, ...]:
        """Return the content of a block of the only group."""
        return tuple(self.blocks.get((0, block), [None] * self.block_size))

    def copy_in(self, block: int, content: tuple[object, ...]) -> None:
        facts = [*content, *[None] * self.block_size][: self.block_size]
        self.blocks[0, block] = facts  # type: ignore[assignment]


def _triples(frame: bytes) -> Iterator[tuple[int, int, int]]:
    ids = decode_ids(frame)
    return zip(ids[0::3], ids[1::3], ids[2::3], strict=True)
