"""The columns of the running requests against lists that grow one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tokenloom.core.scheduling.step.rows import Rows

NUM_ROWS = 6


@pytest.mark.parametrize("seed", range(5))
def test_rows_take_one_token_or_several_each(seed: int) -> None:
    rng = random.Random(seed)
    rows = Rows(NUM_ROWS, 2000, block_size=4)
    tokens: list[list[int]] = [[] for _ in range(NUM_ROWS)]
    for _ in range(300):
        entries = [row for row in range(NUM_ROWS) for _ in range(rng.randrange(4))]
        positions, token_ids = [], [rng.randrange(1000) for _ in entries]
        for row, token_id in zip(entries, token_ids, strict=True):
            positions.append(len(tokens[row]))
            tokens[row].append(token_id)
        counts = np.bincount(np.array(entries, np.int32), minlength=NUM_ROWS)
        places = rows.places(*np.array([entries, positions], np.int32))
        rows.append(places, np.array(token_ids, np.int32), counts)
        assert rows.num_tokens.tolist() == [len(each) for each in tokens]
    assert [rows.tokens[row, : len(each)].tolist() for row, each in enumerate(tokens)] == tokens
