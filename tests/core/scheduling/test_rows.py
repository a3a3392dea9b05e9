"""The columns of the running requests against lists that grow one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tokenloom.core.scheduling.rows import Rows
from tokenloom.ipc.codec import encode_ids

NUM_ROWS = 6


@pytest.mark.parametrize("seed", range(5))
def test_what_is_gathered_is_in_the_columns_whenever_they_are_read(seed: int) -> None:
    rng = random.Random(seed)
    rows = Rows(NUM_ROWS, 500, block_size=4)
    batches = [np.array(sorted(rng.sample(range(NUM_ROWS), size)), np.int32) for size in (1, 3, NUM_ROWS)]
    tokens: list[list[int]] = [[] for _ in range(NUM_ROWS)]
    num_scheduled = [0] * NUM_ROWS
    for _ in range(300):
        batch, action = rng.choice(batches), rng.random()
        if action < 0.4:
            rows.advance(batch)
            for row in batch.tolist():
                num_scheduled[row] += 1
        elif action < 0.8:
            token_ids = [rng.randrange(1000) for _ in batch]
            rows.append(batch, encode_ids(token_ids))
            for row, token_id in zip(batch.tolist(), token_ids, strict=True):
                tokens[row].append(token_id)
        elif action < 0.9:
            assert rows.num_scheduled.tolist() == num_scheduled
        else:
            assert rows.num_tokens.tolist() == [len(each) for each in tokens]
            assert [rows.tokens[row, : len(each)].tolist() for row, each in enumerate(tokens)] == tokens
