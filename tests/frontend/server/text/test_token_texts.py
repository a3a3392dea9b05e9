"""The texts and the bytes of an answer's tokens join to the answer, for every kind of tokenizer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tokenloom.frontend.server.text.detokenizer import DetokenizerFactory
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.tests.frontend.checkpoint.gguf.gguf_vocabulary import write_named
from tokenloom.tests.frontend.checkpoint.gguf.test_tokenizer import tokenizer_of
from tokenloom.tests.frontend.server.text.detokenizer_cases import BYTE_TOKEN
from tokenloom.tests.frontend.server.text.samples import KINDS, SENTENCE_PIECE_KINDS, SENTENCES, new_tokenizer

ALL_KINDS = (*KINDS, *SENTENCE_PIECE_KINDS)
GGUF = ("gpt-2", "llama", "llama with spaces", "llama without space")


def spelled(tokenizer: Tokenizer, token: str) -> int:
    assert tokenizer.backend is not None
    token_id = tokenizer.backend.token_to_id(token)
    assert token_id is not None
    return token_id


def random_words(rng: random.Random, tokenizer: Tokenizer) -> list[int]:
    """Draw parts of sentences and single tokens, each of whole characters: transformers' library is the oracle, and it
    shows a whole run of byte tokens as invalid if one of them is."""
    token_ids: list[int] = []
    for _ in range(rng.randrange(1, 6)):
        text = rng.choice(SENTENCES)
        begin = rng.randrange(len(text))
        part = tokenizer.encode(text[begin : begin + 9], add_special_tokens=False)
        one = rng.randrange(tokenizer.size)
        is_whole = not BYTE_TOKEN.fullmatch(tokenizer.token_string(one)) and "\ufffd" not in tokenizer.decode([one])
        token_ids += part if rng.random() < 0.5 or not is_whole else [one]
    return token_ids


def check(tokenizer: Tokenizer, seed: int) -> None:
    rng, texts = random.Random(seed), DetokenizerFactory(tokenizer).texts
    before = tokenizer.encode("The", add_special_tokens=False)
    for _ in range(200):
        token_ids = random_words(rng, tokenizer)
        begin = tokenizer.decode(before, skip_special_tokens=False)
        after = tokenizer.decode(before + token_ids, skip_special_tokens=False).removeprefix(begin)
        joined = b"".join(map(texts.bytes_of, token_ids)).decode()
        assert joined == after, token_ids
        alone = tokenizer.decode(token_ids, skip_special_tokens=False)  # WordPiece shows its marker at the begin
        assert alone.removeprefix("##") in (joined, joined.removeprefix(" "))
        if "\ufffd" not in "".join(map(texts.__getitem__, token_ids)):
            assert "".join(map(texts.__getitem__, token_ids)) == after


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_texts_and_bytes_of_random_tokens_join_to_their_text(kind: str) -> None:
    check(new_tokenizer(kind), seed=7)


@pytest.mark.parametrize("name", GGUF)
def test_texts_and_bytes_of_the_tokens_of_a_gguf_file_join_to_their_text(name: str, tmp_path: Path) -> None:
    check(tokenizer_of(write_named(name, tmp_path)), seed=8)


@pytest.mark.parametrize("kind", ["byte_fallback", "gemma", "llama_metaspace"])
def test_a_word_with_and_one_without_a_space_have_different_texts(kind: str) -> None:
    tokenizer = new_tokenizer(kind)
    texts = DetokenizerFactory(tokenizer).texts
    assert (texts[spelled(tokenizer, "▁")], texts[spelled(tokenizer, "▁▁")]) == (" ", "  ")
    assert (texts[spelled(tokenizer, "▁and")], texts[spelled(tokenizer, "and")]) == (" and", "and")


@pytest.mark.parametrize("kind", ["byte_fallback", "byte_level"])
def test_a_part_of_a_character_has_its_own_bytes_and_an_unknown_id_no_text(kind: str) -> None:
    tokenizer = new_tokenizer(kind)
    texts = DetokenizerFactory(tokenizer).texts
    parts = tokenizer.encode("漢", add_special_tokens=False)[-3:]
    assert b"".join(map(texts.bytes_of, parts)) == "漢".encode()
    assert [texts[each] for each in (*parts, tokenizer.size + 1, -1)] == ["\ufffd"] * 3 + ["", ""]


def test_a_tokenizer_in_python_that_strips_texts_has_words_with_their_spaces() -> None:
    """Such as a checkpoint's own code around SentencePiece, which has no backend."""
    words = ["▁the", "▁cat", "s", "▁"]
    tokenizer = Tokenizer(
        lambda text, special: [],
        lambda ids, skip: "".join(words[each] for each in ids if each < 4).replace("▁", " ").removeprefix(" "),
        size=len(words),
        special_ids=frozenset(),
        config={},
        backend=None,
    )
    texts = DetokenizerFactory(tokenizer).texts
    assert [texts[each] for each in (0, 1, 2, 3, 9)] == [" the", " cat", "s", " ", ""]
