"""A match of a row is in its own tokens, is as long as it says, and is found whenever one is there."""

from __future__ import annotations

import numpy as np
import pytest

from tokenloom.core.features.speculation.ngrams import LENGTHS, MAX_LENGTH
from tokenloom.core.features.speculation.own_index import MAX_NEW_TOKENS, OwnIndex
from tokenloom.core.scheduling.step.rows import Rows


@pytest.mark.parametrize("vocab_size", [2, 20, 60])
def test_matches_of_many_rows_are_true_and_few_are_missed(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    state, index = Rows(6, 400, 16), OwnIndex(6, 400)
    rows = np.arange(6)
    state.tokens[:] = rng.integers(0, vocab_size, state.tokens.shape)
    state.num_tokens[:] = rng.integers(1, 30, 6)
    num_found = num_missed = 0
    while state.num_tokens.min() < 380:
        state.num_tokens[:] = np.minimum(state.num_tokens + rng.integers(0, 5, 6), 390)
        hashes = index.update(state, rows)
        for row in rows.tolist():
            end, text = int(state.num_tokens[row]), state.tokens[row].tolist()
            match = index.find(state, row, hashes[:, row], 12)
            known = {tuple(text[i - n : i]) for n in LENGTHS for i in range(MAX_LENGTH, end)}
            longest = max((n for n in LENGTHS if end > MAX_LENGTH and tuple(text[end - n : end]) in known), default=0)
            assert match is None or longest > 0
            num_missed += match is None and longest > 0  # newer places have taken all its slots
            if match is not None:
                num_found += 1
                assert match.length >= 2 and len(match.token_ids) == 12
                places = (i for i in range(2, end) if text[i - 2 : i] == text[end - 2 : end])
                assert any((text[i:end] + match.token_ids)[:12] == match.token_ids for i in places)
    assert num_found > 20 and num_missed < 0.2 * num_found


def test_another_request_on_a_row_finds_nothing_of_the_one_before() -> None:
    rng = np.random.default_rng(1)
    state, index, rows = Rows(1, 400, 16), OwnIndex(1, 400), np.array([0])
    state.tokens[0, :200], state.num_tokens[0] = rng.integers(0, 1000, 200), 200
    index.update(state, rows)
    old = state.tokens[0, 50:70].copy()
    state.epoch[0] += 1
    state.tokens[0, :30], state.num_tokens[0] = np.concatenate([rng.integers(1000, 2000, 10), old]), 30
    assert index.find(state, 0, index.update(state, rows)[:, 0], 5) is None


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    length = 3 * MAX_NEW_TOKENS
    state, index, rows = Rows(1, length + 100, 16), OwnIndex(1, length + 100), np.array([0])
    rng = np.random.default_rng(2)
    state.tokens[0, :length] = rng.integers(0, 5000, length)
    state.tokens[0, length - 10 : length] = state.tokens[0, length - 1000 : length - 990]
    state.num_tokens[0] = length
    found = [index.find(state, 0, index.update(state, rows)[:, 0], 5) for _ in range(4)]
    assert found[0] is None and found[-1] is not None and found[-1].length == 10
