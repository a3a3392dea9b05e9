"""Offsets of tokens are places in the text that the caller gets: of an answer, and of a prompt as it was sent."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from tokenloom.frontend.forms.openai.logprobs import TokenOffsets
from tokenloom.frontend.server.text.detokenizer import DetokenizerFactory
from tokenloom.frontend.server.text.token_offsets import answer_offsets, prompt_offsets
from tokenloom.ipc.codec import encode_ids
from tokenloom.tests.frontend.server.text.detokenizer_cases import oracle
from tokenloom.tests.frontend.server.text.samples import KINDS, SENTENCE_PIECE_KINDS, SENTENCES, new_tokenizer

BYTE_TOKEN_KINDS = ("byte_fallback", "gemma", "llama_metaspace")  # the library shows a whole run of bytes as invalid
ALL_KINDS = (*KINDS, *SENTENCE_PIECE_KINDS)
DEFAULTS = SimpleNamespace(skip_special_tokens=None, spaces_between_special_tokens=None)


def offsets_of(offsets: TokenOffsets, token_ids: list[int]) -> list[int]:
    return [offsets.next(token_id) for token_id in token_ids]


@pytest.mark.parametrize("start", [0, 11])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_an_answers_token_begins_behind_the_whole_characters_before_it(kind: str, start: int) -> None:
    tokenizer = new_tokenizer(kind)
    factory, prompt = DetokenizerFactory(tokenizer), tokenizer.encode("The")
    before = len(tokenizer.decode(prompt))
    for sentence in SENTENCES:
        token_ids = tokenizer.encode(sentence, add_special_tokens=False)
        found = offsets_of(answer_offsets(factory, encode_ids(prompt), DEFAULTS, start), token_ids)
        decode = partial(oracle, tokenizer) if kind in BYTE_TOKEN_KINDS else tokenizer.decode
        parts = [decode(prompt + token_ids[:count]).rstrip("\ufffd") for count in range(len(token_ids))]
        assert found == [start + len(part) - before for part in parts]


def test_the_space_that_an_answer_lacks_at_its_begin_is_not_counted() -> None:
    tokenizer = new_tokenizer("byte_fallback")
    token_ids = tokenizer.encode("The capital", add_special_tokens=False)
    found = offsets_of(answer_offsets(DetokenizerFactory(tokenizer), b"", DEFAULTS, 0), token_ids)
    assert found[:2] == [0, 3] and tokenizer.decode(token_ids[:1]) == "The"


@pytest.mark.parametrize(("skips", "expected"), [(None, [0, 0, 0]), (False, [0, 4, 8])])
def test_special_tokens_count_if_they_are_shown(skips: bool | None, expected: list[int]) -> None:
    tokenizer = new_tokenizer("byte_level")
    style = SimpleNamespace(skip_special_tokens=skips, spaces_between_special_tokens=None)
    end = tokenizer.encode("</s>", add_special_tokens=False)
    answer = answer_offsets(DetokenizerFactory(tokenizer), encode_ids(tokenizer.encode("The")), style, 0)
    assert offsets_of(answer, [*end, *end, *end]) == expected


@pytest.mark.parametrize("kind", [each for each in ALL_KINDS if each != "word_piece"])
def test_a_prompts_offsets_are_those_that_the_tokenizer_itself_reports(kind: str) -> None:
    tokenizer = new_tokenizer(kind)
    assert tokenizer.backend is not None
    for text in (*SENTENCES, "a <|user|>漢 b", " two  words "):
        encoded = tokenizer.backend.encode(text)
        found = offsets_of(prompt_offsets(DetokenizerFactory(tokenizer), text), encoded.ids)
        assert found == [begin for begin, _ in encoded.offsets], (text, encoded.tokens)


def test_a_special_token_that_the_tokenizer_adds_takes_no_place_in_the_prompt() -> None:
    tokenizer = new_tokenizer("byte_fallback")
    token_ids = tokenizer.encode("The capital")
    assert tokenizer.token_string(token_ids[0]) == "<s>"
    assert offsets_of(prompt_offsets(DetokenizerFactory(tokenizer), "The capital"), token_ids)[:3] == [0, 0, 3]
    shown = offsets_of(prompt_offsets(DetokenizerFactory(tokenizer), None), token_ids)[:3]
    assert shown == [0, 3, 7], "of token ids the text has it: <s> The capital"


def test_offsets_stay_within_a_prompt_that_a_normalizer_has_changed() -> None:
    tokenizer = new_tokenizer("byte_level")
    offsets = prompt_offsets(DetokenizerFactory(tokenizer), "abc")
    found = offsets_of(offsets, tokenizer.encode("something longer", add_special_tokens=False))
    assert found == sorted(found) and found[-1] <= 3
