"""Text comes out as it is made, is never taken back, and is the same however the tokens come."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest

from tokenloom.frontend.detokenizer import Detokenizer, DetokenizerFactory, PieceDetokenizer, WindowDetokenizer
from tokenloom.frontend.tokenizer import Tokenizer

from .samples import KINDS, SENTENCES, new_tokenizer

NUM_SEQUENCES = 10_000  # over all kinds
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def stream(detokenizer: Detokenizer, token_ids: list[int]) -> Iterator[str]:
    for token_id in token_ids:
        yield detokenizer.append(token_id)
    yield detokenizer.finish()


def random_ids(rng: random.Random, tokenizer: Tokenizer, count: int) -> list[int]:
    """Pieces of real text, bytes at random, special tokens, and ids that the tokenizer lacks."""
    token_ids: list[int] = []
    while len(token_ids) < count:
        if rng.random() < 0.5:
            text = rng.choice(SENTENCES)
            begin = rng.randrange(len(text))
            token_ids += tokenizer.encode(text[begin : begin + 12], add_special_tokens=False)
        else:
            token_ids += [rng.randrange(tokenizer.size + 5) for _ in range(rng.randrange(1, 4))]
    return token_ids[:count]


def oracle(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """decode(all), but byte tokens are bytes: the library turns a whole run of them into U+FFFD if one is broken."""
    assert tokenizer.backend is not None
    kept = [token_id for token_id in token_ids if token_id not in tokenizer.special_ids and token_id < tokenizer.size]
    data, text = b"", ""
    for token_id in [*kept, -1]:
        token = "" if token_id < 0 else tokenizer.backend.id_to_token(token_id) or ""
        match = BYTE_TOKEN.fullmatch(token)
        if match:
            data += bytes([int(match[1], 16)])
            continue
        text += data.decode(errors="replace")
        data = b""
        text += token.replace("▁", " ")
    return text.removeprefix(" ")


def whole(kind: str, tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return oracle(tokenizer, token_ids) if kind == "byte_fallback" else tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_join_to_the_text_of_all_tokens(kind: str) -> None:
    rng, tokenizer = random.Random(1), new_tokenizer(kind)
    factory = DetokenizerFactory(tokenizer)
    for _ in range(NUM_SEQUENCES // len(KINDS)):
        token_ids = random_ids(rng, tokenizer, rng.randrange(1, 24))
        detokenizer = factory.new([], True)
        assert isinstance(detokenizer, PieceDetokenizer)
        assert "".join(stream(detokenizer, token_ids)) == whole(kind, tokenizer, token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_is_context_and_never_part_of_the_text(kind: str) -> None:
    rng, tokenizer = random.Random(2), new_tokenizer(kind)
    factory = DetokenizerFactory(tokenizer)
    for _ in range(1000):
        text = rng.choice(SENTENCES)
        prompt = tokenizer.encode(text)
        output = random_ids(rng, tokenizer, rng.randrange(1, 12))
        expected = whole(kind, tokenizer, prompt + output)
        before = whole(kind, tokenizer, prompt)
        assert expected.startswith(before)
        assert before + "".join(stream(factory.new(prompt, True), output)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_no_replacement_character_for_what_completes_later(kind: str) -> None:
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


def test_broken_bytes_come_out_as_soon_as_they_are_known_to_be_broken() -> None:
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


def test_a_run_of_bytes_streams_character_by_character() -> None:
    """A language of which the tokenizer knows no character must not wait for the end of the run."""
    tokenizer = new_tokenizer("byte_fallback")
    prompt, text = tokenizer.encode("The"), "漢字かな"
    token_ids = tokenizer.encode(text, add_special_tokens=False)[1:]
    pieces = [piece for piece in stream(DetokenizerFactory(tokenizer).new(prompt, True), token_ids) if piece]
    assert pieces == list(text)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_and_unknown_ids_leave_no_trace_unless_asked_for(kind: str) -> None:
    tokenizer = new_tokenizer(kind)
    factory = DetokenizerFactory(tokenizer)
    prompt = tokenizer.encode("The")
    token_ids = [2, tokenizer.size + 7, 2**31 - 1]
    assert "".join(stream(factory.new(prompt, True), token_ids)) == ""
    assert "".join(stream(factory.new(prompt, False), token_ids)).strip() == "</s>"


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_tokens_rebuild_the_state_at_any_cut(kind: str) -> None:
    rng, tokenizer = random.Random(3), new_tokenizer(kind)
    factory = DetokenizerFactory(tokenizer)
    prompt = tokenizer.encode("The capital")
    for _ in range(100):
        token_ids = random_ids(rng, tokenizer, 12)
        pieces = list(stream(factory.new(prompt, True), token_ids))
        cut = rng.randrange(len(token_ids))
        resumed = factory.new(prompt, True)
        assert [resumed.append(token_id) for token_id in token_ids[:cut]] == pieces[:cut]
        assert list(stream(resumed, token_ids[cut:])) == pieces[cut:]


@pytest.mark.parametrize("kind", KINDS)
def test_windows_agree_with_pieces_where_text_is_whole(kind: str) -> None:
    tokenizer = new_tokenizer(kind)
    for sentence in SENTENCES:
        token_ids = tokenizer.encode(sentence, add_special_tokens=False)
        cut = tokenizer.encode("The capital", add_special_tokens=False)
        pieces = stream(DetokenizerFactory(tokenizer).new(cut, True), token_ids)
        windows = stream(WindowDetokenizer(tokenizer, cut, True), token_ids)
        assert "".join(windows) == "".join(pieces)


def test_windows_hold_back_no_more_than_three_broken_tokens() -> None:
    tokenizer = new_tokenizer("byte_level")
    rng = random.Random(4)
    for _ in range(300):
        token_ids = random_ids(rng, tokenizer, 30)
        token_ids += tokenizer.encode("The", add_special_tokens=False)
        assert "".join(stream(WindowDetokenizer(tokenizer, [], True), token_ids)) == tokenizer.decode(token_ids)
