"""Tokens are read as they were written, in any mixture of choices."""

from __future__ import annotations

import random

import pytest

from tokenloom.frontend.listening.journal.tokens import ShownAnswer, ShownAnswers, TokenWriter, decode
from tokenloom.ipc.codec import encode_ids
from tokenloom.tests.support.today import seeds


@pytest.mark.parametrize("seed", seeds(3, 30))
def test_tokens_reasons_and_sources_come_back_and_a_writer_goes_on(seed: int) -> None:
    draw, writer, words = random.Random(seed), TokenWriter(), b""
    expected, sources = dict[int, ShownAnswer](), dict[int, bytes]()
    for _ in range(200):
        tokens = [(draw.randrange(4), draw.choice((0, 7, 2**31 - 1))) for _ in range(draw.randrange(3))]
        ended = [(draw.randrange(4), draw.choice(("stop", "length", "tool_calls", "é")))] if draw.random() < 0.1 else []
        logprobs = [(draw.randrange(4), draw.randbytes(draw.randrange(9))) for _ in tokens[: draw.randrange(2)]]
        named = [(draw.randrange(900), draw.randbytes(draw.randrange(70)))] if draw.random() < 0.1 else []
        sources.update(named)
        encoded_tokens = [(choice, encode_ids([token_id])) for choice, token_id in tokens]
        words += writer.encode(encoded_tokens, ended, logprobs, named)
        for choice, encoded in logprobs:
            expected.setdefault(choice, ShownAnswer()).logprobs.append(encoded)
        for choice, token_id in tokens:
            expected.setdefault(choice, ShownAnswer()).token_ids.append(token_id)
        for choice, reason in ended:
            expected.setdefault(choice, ShownAnswer()).finish_reason = reason
        if draw.random() < 0.1:
            found, writer = decode(words)
            assert found == ShownAnswers(expected, sources)
    assert decode(words)[0] == ShownAnswers(expected, sources)


def test_a_token_of_one_choice_takes_four_bytes() -> None:
    writer = TokenWriter()
    assert len(writer.encode([(0, encode_ids([5]))], [])) == 4
    assert len(writer.encode([(1, encode_ids([5])), (1, encode_ids([6]))], [])) == 12
