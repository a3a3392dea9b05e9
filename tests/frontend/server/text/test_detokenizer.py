"""Streamed text appears as soon as it is certain, never changes, and joins to the text of all tokens."""

from __future__ import annotations

import random

import pytest

from tokenloom.frontend.server.text.detokenizer import DetokenizerFactory, WindowDetokenizer
from tokenloom.tests.frontend.server.text.detokenizer_cases import check_sequences, random_ids, stream
from tokenloom.tests.frontend.server.text.samples import KINDS, SENTENCES, new_tokenizer

NUM_SEQUENCES = 10_000  # of all kinds; scripts/chaos/fuzz_detokenizer.py runs more


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_join_to_the_text_of_all_tokens_and_show_nothing_of_the_prompt(kind: str) -> None:
    check_sequences(kind, seed=1, count=NUM_SEQUENCES // len(KINDS))


@pytest.mark.parametrize("kind", KINDS)
def test_an_incomplete_character_is_held_back_until_it_is_complete(kind: str) -> None:
    tokenizer = new_tokenizer(kind)
    factory = DetokenizerFactory(tokenizer)
    for sentence in SENTENCES:
        token_ids = tokenizer.encode(sentence, add_special_tokens=False)
        text = ""
        expected = tokenizer.decode(token_ids)
        for piece in stream(factory.new([], True), token_ids):
            assert "\ufffd" not in piece
            text += piece
            assert expected.startswith(text)
        assert text == expected


def test_invalid_bytes_are_shown_as_soon_as_they_are_certain_to_be_invalid() -> None:
    tokenizer = new_tokenizer("byte_fallback")
    assert tokenizer.backend is not None
    ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in b"\xff\xe2\x82A\xe2\x82\xac\xf0\x9f"]
    prompt = tokenizer.encode("The")
    pieces = list(stream(DetokenizerFactory(tokenizer).new(prompt, True), ids))
    assert pieces == ["\ufffd", "", "", "\ufffdA", "", "", "€", "", "", "\ufffd"]


def test_a_character_that_the_prompt_began_belongs_to_the_output() -> None:
    tokenizer = new_tokenizer("byte_level")
    token_ids = tokenizer.encode("漢", add_special_tokens=False)
    assert len(token_ids) == 3
    for cut in (1, 2):
        detokenizer = DetokenizerFactory(tokenizer).new(tokenizer.encode("The") + token_ids[:cut], True)
        assert "".join(stream(detokenizer, token_ids[cut:])) == "漢"


def test_the_window_detokenizer_holds_back_at_most_three_invalid_tokens() -> None:
    tokenizer = new_tokenizer("byte_level")
    rng = random.Random(4)
    for _ in range(300):
        token_ids = random_ids(rng, tokenizer, 30)
        token_ids += tokenizer.encode("The", add_special_tokens=False)
        assert "".join(stream(WindowDetokenizer(tokenizer, [], True), token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_that_are_shown_are_text_and_the_others_are_skipped(kind: str) -> None:
    tokenizer = new_tokenizer(kind)
    shown, *hidden = sorted(tokenizer.special_ids)
    factory, rng = DetokenizerFactory(tokenizer), random.Random(3)
    for _ in range(50):
        token_ids = [rng.choice([shown, *hidden, *random_ids(rng, tokenizer, 3)]) for _ in range(12)]
        for prompt in ([], tokenizer.encode("The", add_special_tokens=False)):
            text = "".join(stream(factory.new(prompt, True, shown_ids=frozenset([shown])), token_ids))
            kept = [token_id for token_id in token_ids if token_id not in hidden]
            assert text == "".join(stream(factory.new(prompt, False), kept))
            assert text.count(tokenizer.token_string(shown)) == token_ids.count(shown)
    assert "".join(stream(factory.new([], False, shown_ids=frozenset([shown])), hidden)) != "", "none is skipped"
