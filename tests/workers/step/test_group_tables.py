"""Tables of several KV groups match plain records, and orders that contradict them change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pytest

from tokenloom.ipc.errors import ProtocolError
from tokenloom.workers.step.group_tables import GroupTables

MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE = 3, 38, 4  # 10 blocks of a row
NUM_BLOCKS, WINDOWS = (40, 90, 20), (None, 9, 6)
Triples: TypeAlias = Sequence[tuple[int, int, int]]


def array(triples: Triples) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    return np.array(triples, np.int32).reshape(-1, 3)


def rows_of(tables: GroupTables) -> list[list[list[int]]]:
    """Return the table of each row by group."""
    rows = np.arange(MAX_NUM_SEQS, dtype=np.int32)
    positions = np.zeros(0, np.int64)
    return [group.block_tables.tolist() for group in tables.of_step(rows, rows[:0], positions)]


def started() -> GroupTables:
    """Row 0 has 5 blocks in each group, and row 1 has 3; of these the last group has freed 2 of row 0's."""
    tables = GroupTables(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS, WINDOWS)
    computed = np.array([13, 12, 0])
    tables.change(array([(0, g, 1 + i) for g in range(3) for i in range(4)]), array([]), computed)
    tables.change(array([(1, g, 10 + i) for i in range(3) for g in range(3)]), array([]), computed)
    tables.change(array([(0, 2, 5), (0, 0, 5), (0, 1, 5)]), array([(0, 2, 2)]), computed)
    return tables


def test_tables_slots_and_freed_blocks_are_those_of_each_group() -> None:
    tables = started()
    assert tables.num_slots.tolist() == [20, 12, 0] and tables.highest_blocks.tolist() == [12] * 3
    assert rows_of(tables) == [[[1, 2, 3, 4, 5], [10, 11, 12, 0, 0], [0] * 5]] * 2 + [
        [[0, 0, 3, 4, 5], [10, 11, 12, 0, 0], [0] * 5]
    ]
    tables.forget_step()
    rows, positions = np.array([0, 0, 1], np.int32), np.array([13, 14, 9])
    groups = tables.of_step(rows[1:], rows, positions)
    assert [group.slots.tolist() for group in groups] == [[4 * 4 + 1, 4 * 4 + 2, 12 * 4 + 1]] * 3
    assert groups[0].num_freed is None and groups[2].num_freed is not None and groups[2].num_freed.tolist() == [2, 0]
    tables.change(array([(0, 0, 6), (0, 1, 6)]), array([]), np.array([20, 0, 0]))
    assert tables.num_slots.tolist() == [20, 12, 0]  # the last group has no sixth block
    tables.clear_row(0)
    assert tables.num_slots.tolist() == [0, 12, 0] and not any(map(any, (group[0] for group in rows_of(tables))))


def test_a_row_begins_with_null_blocks_behind_its_windows() -> None:
    """A hit of 5 blocks: the windows need the last 2, and one of them half."""
    tables = GroupTables(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS, WINDOWS)
    tables.change(array([(2, 1, block) for block in (0, 0, 0, 7, 8, 9)]), array([]), np.array([0, 0, 20]))
    assert rows_of(tables)[1][2] == [0, 0, 0, 7, 8, 9]


def append(*blocks: tuple[int, int, int]) -> tuple[Triples, Triples]:
    return blocks, ()


def free(*frees: tuple[int, int, int]) -> tuple[Triples, Triples]:
    return [(row, group, 9) for row, group, _ in frees if group in (1, 2) and row < 2], frees


@pytest.mark.parametrize(
    ("orders", "reason"),
    [
        (append((0, 0, 6), (0, 3, 6)), "KV groups 0 to 3 are given"),
        (append((0, -1, 6)), "KV groups -1 to -1"),
        (append((0, 0, 40)), r"\[1, 40\)"),
        (append((0, 1, 89), (0, 2, 20)), r"block 20 is appended as entry 5 of row 0 in KV group 2.*\[1, 20\)"),
        (append((0, 1, 6), (0, 1, -1)), "block -1 is appended as entry 6"),
        (append((2, 0, 0)), "block 0 is appended as entry 0 of row 2 in KV group 0"),
        (append((2, 1, 0)), "block 0 is appended as entry 0 of row 2 in KV group 1"),  # token 0 is the next
        (append((1, 1, 0)), "block 0 is appended as entry 3 of row 1"),
        (append(*[(1, 1, 6)] * 8), "row 1 is given 11 blocks"),
        (free((0, 0, 1)), "relieved"),  # it has no window
        (free((0, 4, 1)), "KV groups 4 to 4 are relieved"),
        (free((0, 1, 0)), "first 0 blocks"),
        (free((0, 1, 2)), "first 2 blocks"),  # token 13 sees token 5
        (free((0, 2, 1)), "2 are freed"),
        (free((0, 2, 3)), "first 3 blocks"),
        (free((1, 2, 2)), "first 2 blocks"),  # token 12 sees token 7
        (free((1, 1, 2)), "first 2 blocks"),
        (free((0, 1, 1), (0, 1, 1)), "once a step"),
        (([(1, 1, 6)], [(0, 1, 1)]), "only with new blocks"),
        (([], [(0, 1, 1)]), "only with new blocks"),
        (([(2, 1, 6)], [(2, 1, 2)]), "of 1 blocks"),
    ],
)
def test_orders_that_contradict_the_tables_change_nothing(orders: tuple[Triples, Triples], reason: str) -> None:
    tables, (appends, frees) = started(), orders
    computed = np.array([13, 12, 0 if frees == () else 38])
    before = rows_of(tables), tables.num_slots.tolist(), tables.highest_blocks.tolist()
    with pytest.raises(ProtocolError, match=reason):
        tables.change(array(appends), array(frees), computed)
    tables.forget_step()
    assert before == (rows_of(tables), tables.num_slots.tolist(), tables.highest_blocks.tolist())


@pytest.mark.parametrize("computed", range(9, 30))
def test_a_block_is_free_once_no_later_token_sees_it(computed: int) -> None:
    def are_taken(appends: Triples, frees: Triples) -> bool:
        tables = GroupTables(1, MAX_MODEL_LEN, BLOCK_SIZE, [9], [9])
        try:
            tables.change(array(appends), array(frees), np.array([computed]))
        except ProtocolError:
            return False
        return True

    first_seen = computed - 9 + 1  # by the next token
    for count in range(1, 8):
        is_free = count * BLOCK_SIZE <= first_seen
        assert are_taken([(0, 0, 5)] * 8, [(0, 0, count)]) == is_free
        assert are_taken([(0, 0, 0)] * count, []) == is_free
