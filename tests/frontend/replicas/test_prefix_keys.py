"""Equal keys mean equal tokens up to there, and an equal root."""

from __future__ import annotations

import hashlib

import numpy as np

from tokenloom.frontend.replicas.prefix_keys import KEY_TOKENS, prefix_keys

PROMPT = np.arange(5 * KEY_TOKENS + 7, dtype=np.int32)


def test_a_prompt_has_a_key_for_each_whole_piece() -> None:
    assert len(prefix_keys(PROMPT.tobytes())) == 5
    assert prefix_keys(PROMPT[: KEY_TOKENS - 1].tobytes()) == []


def test_keys_are_the_hashes_of_a_chain() -> None:
    digest, expected = hashlib.sha256(b"adapter").digest(), []
    for begin in range(0, 5 * KEY_TOKENS, KEY_TOKENS):
        digest = hashlib.sha256(digest + PROMPT[begin : begin + KEY_TOKENS].tobytes()).digest()
        expected.append(int.from_bytes(digest[:8], "little"))
    assert prefix_keys(PROMPT.tobytes(), b"adapter") == expected


def test_prompts_share_keys_up_to_their_first_difference() -> None:
    other = PROMPT.copy()
    other[2 * KEY_TOKENS] += 1
    same = [a == b for a, b in zip(prefix_keys(PROMPT.tobytes()), prefix_keys(other.tobytes()), strict=True)]
    assert same == [True, True, False, False, False]


def test_prompts_under_different_roots_share_no_key() -> None:
    assert not set(prefix_keys(PROMPT.tobytes(), b"a")) & set(prefix_keys(PROMPT.tobytes(), b"b"))
