"""Segments of a step read and write the states of its rows, and moves that contradict them are refused."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import pytest

from tokenloom.ipc.errors import ProtocolError
from tokenloom.tests.workers.random_schedule import frame, new_row
from tokenloom.workers.machine.arrays import ids_of
from tokenloom.workers.sampling.drafts import StepDrafts
from tokenloom.workers.step.input_batch import InputBatch
from tokenloom.workers.step.step_inputs import StateInputs

BLOCK_SIZE, NUM_BLOCKS, GROUP = 4, 12, 1  # of states
Moves: TypeAlias = list[tuple[int, int, int, int]]  # row, group, position, block
Counts: TypeAlias = dict[int, int]  # by row: tokens of the step


def new_batch() -> InputBatch:
    return InputBatch(4, 64, BLOCK_SIZE, [99], vocab_size=100, num_state_blocks=NUM_BLOCKS)


def admit(batch: InputBatch, row: int, num_tokens: int, num_computed: int = 0) -> None:
    batch.admit(new_row(row, list(range(num_tokens)), num_computed))
    batch.append_blocks(np.array([(row, 0, 1 + 16 * row + i) for i in range(8)], np.int32))


def step(batch: InputBatch, counts: Counts, moves: Moves, drafts: list[int] | None = None) -> StateInputs:
    """Compute a step; drafts: as in SchedulerOutput."""
    rows = frame(*counts)
    if moves:
        batch.move_states(np.array(moves, np.int32), ids_of(rows))
    layout = batch.layout(rows, frame(*counts.values()))
    of_rows = StepDrafts.of(ids_of(frame(*drafts)), layout.rows, 100) if drafts else None
    inputs = batch.prepare(layout, of_rows)
    batch.advance(layout, of_rows)
    assert inputs.states is not None
    return inputs.states


def lists(states: StateInputs) -> list[list[int]]:
    return [each.tolist() for each in states]


def test_rows_move_at_boundaries_and_find_the_snapshots_that_others_left() -> None:
    batch = new_batch()
    admit(batch, 0, 20)
    admit(batch, 2, 30)
    # Row 2 leaves snapshots at 4 and at 8.
    found = step(batch, {0: 3, 2: 10}, [(0, 1, 0, 5), (2, 1, 0, 6), (2, 1, 4, 7), (2, 1, 8, 8)])
    assert lists(found) == [[0, 3, 7, 11, 13], [-1, -1, 6, 7], [5, 6, 7, 8]]
    found = step(batch, {2: 1, 0: 1}, [])  # the order of the message
    assert lists(found) == [[0, 1, 2], [8, 5], [8, 5]]
    admit(batch, 1, 12, 8)
    admit(batch, 3, 12, 8)
    moves = [(1, 1, 0, 7), (1, 1, 8, 9), (3, 1, 0, 7), (3, 1, 8, 10), (0, 1, 4, 11)]
    found = step(batch, {0: 1, 1: 2, 3: 2, 2: 1}, moves)  # rows with one token come first
    assert lists(found) == [[0, 1, 2, 4, 6], [5, 8, 7, 7], [11, 8, 9, 10]]
    assert batch.highest_blocks == [56, 11]


def test_a_step_with_drafts_reads_the_state_and_the_next_one_computes_its_tokens_again() -> None:
    batch = new_batch()
    admit(batch, 0, 8)
    step(batch, {0: 7}, [(0, 1, 0, 5)])
    assert lists(step(batch, {0: 3}, [], [0, 2, 50, 51])) == [[0, 3], [5], [-1]]
    batch.append_kept(np.array([0, 0], np.int32), np.array([50, 60]))
    assert batch.token_ids(0)[7:] == [7, 50, 60]
    assert lists(step(batch, {0: 3}, [(0, 1, 8, 6)])) == [[0, 1, 3], [5, 5], [5, 6]]


def test_a_row_with_drafts_behind_a_hit_or_without_a_state_writes_nothing() -> None:
    batch = new_batch()
    admit(batch, 0, 9)
    step(batch, {0: 5}, [(0, 1, 0, 5), (0, 1, 4, 6)])
    admit(batch, 1, 5, 4)
    admit(batch, 2, 1)
    assert lists(step(batch, {1: 2}, [(1, 1, 0, 5)], [1, 1, 50])) == [[0, 2], [5], [-1]]
    assert lists(step(batch, {2: 2}, [], [2, 1, 50])) == [[0, 2], [-1], [-1]]
    assert lists(step(batch, {1: 1, 2: 1}, [(1, 1, 4, 7), (2, 1, 0, 8)])) == [[0, 1, 2], [5, -1], [7, 8]]


def started() -> InputBatch:
    """Row 0 has computed 6 of 20 tokens in block 5, after a snapshot in block 4; row 1 has computed none of 9; row 2
    has found 4 of 9 tokens; row 3 is free."""
    batch = new_batch()
    admit(batch, 0, 20)
    step(batch, {0: 6}, [(0, 1, 0, 4), (0, 1, 4, 5)])
    admit(batch, 1, 9)
    admit(batch, 2, 9, 4)
    return batch


GOOD: Moves = [(0, 1, 8, 6), (1, 1, 0, 7), (2, 1, 0, 4), (2, 1, 4, 8)]
COUNTS: Counts = {0: 4, 1: 3, 2: 1}


@pytest.mark.parametrize(
    ("moves", "counts", "error"),
    [
        ([*GOOD, (3, 1, 0, 9)], COUNTS, "row 3 is given a state, but it is not in use"),
        ([*GOOD, (9, 1, 0, 9)], COUNTS, r"rows are \[0, 4\)"),
        (GOOD, {0: 4, 1: 3}, "row 2 moves to block 4 .* the step has the rows"),
        ([(0, 0, 8, 6), *GOOD[1:]], COUNTS, "KV group 0 at token 8: .* states are in group 1"),
        ([(0, 1, 8, 0), *GOOD[1:]], COUNTS, r"moves to block 0 .* blocks \[1, 12\)"),
        ([(0, 1, 8, 12), *GOOD[1:]], COUNTS, r"moves to block 12 .* blocks \[1, 12\)"),
        ([(0, 1, -1, 6), *GOOD[1:]], COUNTS, "moves to block 6 of KV group 1 at token -1"),
        ([(0, 1, 5, 6), *GOOD[1:]], COUNTS, "moves to block 6 at token 5, outside the 4 tokens of the step"),
        ([(0, 1, 10, 6), *GOOD[1:]], COUNTS, "moves to block 6 at token 10, outside the 4 tokens"),
        ([(0, 1, 8, 6), (0, 1, 8, 9), *GOOD[1:]], COUNTS, "moves to block 9 at token 8, outside .* twice"),
        (GOOD[:3], COUNTS, "row 2 has no block for its state: it found block 4"),
        ([GOOD[0], *GOOD[2:]], COUNTS, "row 1 has no block for its state"),
        ([*GOOD[:2], GOOD[3]], COUNTS, "row 2 continues at token 4, its state in block 0 ends at"),
        ([*GOOD[:2], (2, 1, 0, 5), GOOD[3]], COUNTS, "row 2 finds the state after 4 tokens in block 5, .* after 6"),
        ([*GOOD[:2], (2, 1, 0, 9), GOOD[3]], COUNTS, "row 2 finds the state after 4 tokens in block 9, .* after -1"),
        ([*GOOD[:3], (2, 1, 4, 7)], COUNTS, r"blocks \[7\] are written by one of the rows"),
        ([*GOOD[:3], (2, 1, 4, 5)], COUNTS, "are written by one of the rows"),
        ([(0, 1, 8, 4), *GOOD[1:]], COUNTS, r"blocks \[4\] are written by one of the rows"),
    ],
)
def test_moves_that_would_read_or_destroy_another_state_are_refused(moves: Moves, counts: Counts, error: str) -> None:
    with pytest.raises(ProtocolError, match=error):
        step(started(), counts, moves)
    found = step(started(), COUNTS, GOOD)
    assert lists(found) == [[0, 1, 3, 5, 8], [4, 5, 5, -1], [8, 5, 6, 7]]


def test_moves_beside_drafts_and_without_states_are_refused() -> None:
    batch = started()
    step(batch, {0: 13}, [])
    with pytest.raises(ProtocolError, match="at token 19, outside the 3 tokens of the step, twice, or beside drafts"):
        step(batch, {0: 3}, [(0, 1, 19, 6)], [0, 2, 50, 51])
    plain = InputBatch(4, 64, BLOCK_SIZE, [99])
    with pytest.raises(ProtocolError, match=r"states of rows \[0\] move, but no layer keeps a state"):
        step(plain, {0: 1}, [(0, 1, 0, 5)])


def test_a_block_that_was_copied_from_a_slot_has_the_state_that_a_row_finds_there() -> None:
    batch = new_batch()
    admit(batch, 0, 20, 8)
    batch.load_states(np.array([(2 * 5 + GROUP, 7), (2 * 5, 9)], np.int32))  # block 9 is of the other group
    with pytest.raises(ProtocolError, match=r"row 0 finds the state after 8 tokens in block 9, .* after -1"):
        step(batch, {0: 1}, [(0, 1, 0, 9), (0, 1, 8, 6)])
    assert lists(step(batch, {0: 1}, [(0, 1, 0, 7), (0, 1, 8, 6)])) == [[0, 1], [7], [6]]
    admit(batch, 1, 20, 12)
    with pytest.raises(ProtocolError, match=r"row 1 finds the state after 12 tokens in block 7, .* after 8"):
        step(batch, {1: 1}, [(1, 1, 0, 7), (1, 1, 12, 5)])


def test_states_outlive_the_rows_of_a_core() -> None:
    batch = started()
    batch.clear()
    admit(batch, 0, 9, 4)
    assert lists(step(batch, {0: 1}, [(0, 1, 0, 4), (0, 1, 4, 9)])) == [[0, 1], [4], [9]]
    batch = started()
    batch.free(np.array([0], np.int32))
    admit(batch, 0, 9)
    with pytest.raises(ProtocolError, match="row 0 has no block for its state"):
        step(batch, {0: 1}, [])
