"""The end of a text that is tokenized in its place has the same last tokens."""

from __future__ import annotations

import random

import pytest

from tokenloom.frontend.supervisor.resolve import DEMO_FOLDER
from tokenloom.frontend.text.tokenizer import Tokenizer
from tokenloom.tests.frontend.text.samples import SENTENCES, new_tokenizer

NUM_TOKENS = 300


def load_demo() -> Tokenizer:
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    assert tokenizer is not None
    return tokenizer


def long_text(seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(SENTENCES) for _ in range(3000))


@pytest.mark.parametrize("tokenizer", [load_demo(), new_tokenizer("byte_fallback")], ids=["byte level", "fallback"])
def test_the_end_of_a_long_text_has_the_same_last_tokens(tokenizer: Tokenizer) -> None:
    for seed in range(4):
        text = long_text(seed) + SENTENCES[seed][:seed]
        end = tokenizer.tail(text, NUM_TOKENS)
        assert text.endswith(end) and len(end) < len(text) / 4
        assert tokenizer.encode(end)[-NUM_TOKENS:] == tokenizer.encode(text)[-NUM_TOKENS:]


@pytest.mark.parametrize("text", ["x" * 200_000, "1 2 3 " * 40_000, "a\n" * 100_000, "a b " * 100], ids=len)
def test_a_text_without_a_certain_place_is_not_cut(text: str) -> None:
    assert load_demo().tail(text, NUM_TOKENS) == text


@pytest.mark.parametrize("kind", ["byte_level", "unigram", "word_piece"])
def test_a_tokenizer_whose_tokens_reach_over_spaces_or_drop_text_cuts_nothing(kind: str) -> None:
    text = long_text(0)  # the first kind has the added token "two words"
    assert new_tokenizer(kind).tail(text, NUM_TOKENS) == text
