"""Rows of a step get disjoint blocks of their own, and see all their tokens; other orders are refused."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tokenloom.ipc.errors import ProtocolError
from tokenloom.tests.support.today import seeds
from tokenloom.workers.step.step_inputs import GroupInputs
from tokenloom.workers.step.step_tables import StepTables

BLOCK_SIZE = 4


def layout(counts: list[int], tables: StepTables) -> GroupInputs:
    rows = np.arange(len(counts), dtype=np.int32)
    positions = np.concatenate([np.arange(count) for count in counts])
    (found,) = tables.of_step(rows, np.repeat(rows, counts), positions)
    return found


@pytest.mark.parametrize("seed", seeds(5, 50))
def test_slots_are_those_of_the_tables_and_no_two_tokens_share_one(seed: int) -> None:
    draw = random.Random(seed)
    counts = [draw.choice([1, 2, 3, 4, 5, 8, 21]) for _ in range(draw.randrange(1, 9))]
    num_blocks = 1 + sum(-(-count // BLOCK_SIZE) for count in counts)
    tables = StepTables(8, 32, BLOCK_SIZE, num_blocks)
    found, start = layout(counts, tables), 0
    assert len(set(found.slots.tolist())) == sum(counts) and found.slots.min() >= BLOCK_SIZE
    assert found.see_until is not None
    for row, count in enumerate(counts):
        positions = np.arange(count)
        blocks = found.block_tables[row, positions // BLOCK_SIZE]
        of_row = slice(start, start + count)
        assert found.slots[of_row].tolist() == (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).tolist()
        assert set(found.see_until[of_row].tolist()) == {count - 1}
        assert not found.block_tables[row, -(-count // BLOCK_SIZE) :].any()
        start += count
    assert tables.highest_blocks.tolist() == [num_blocks - 1]
    tables.forget_step()
    assert layout([1], tables).slots.tolist() == [BLOCK_SIZE], "a step does not begin at the start of the pool"


def test_orders_that_no_encoder_has_are_refused() -> None:
    tables, rows = StepTables(8, 32, BLOCK_SIZE, 3), np.array([0, 1], np.int32)
    with pytest.raises(ProtocolError, match="the pool has 2"):
        layout([5, 4], tables)
    with pytest.raises(ProtocolError, match="from their first token on"):
        tables.of_step(rows, np.array([0, 0, 1], np.int32), np.array([0, 1, 1]))
    no_frees = np.empty((0, 3), np.int32)
    with pytest.raises(ProtocolError, match="1 blocks are appended"):
        tables.change(np.array([[0, 0, 1]], np.int32), no_frees, np.zeros(8, np.int64))
