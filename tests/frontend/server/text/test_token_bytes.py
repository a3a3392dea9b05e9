"""A text refused by its bytes has too many tokens; a tokenizer that drops text has no limit."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from tokenloom.frontend.forms.prompt_limits import PromptLimits
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.params.sampling_params import CutSide
from tokenloom.tests.frontend.server.text.samples import SENTENCES, backend_json, new_tokenizer

Backend = tokenizers.Tokenizer


def changed(kind: str, change: Callable[[Backend], object]) -> Tokenizer:
    backend = Backend.from_str(backend_json(kind))
    change(backend)
    return Tokenizer.from_backend(backend, {})


def normalized(*parts: normalizers.Normalizer) -> Callable[[Backend], None]:
    def change(backend: Backend) -> None:
        backend.normalizer = normalizers.Sequence(list(parts))

    return change


def split(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Callable[[Backend], None]:
    def change(backend: Backend) -> None:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, pre_tokenizers.ByteLevel()])

    return change


TOKENIZERS = {
    "byte level": new_tokenizer("byte_level"),
    "byte fallback": new_tokenizer("byte_fallback"),
    "composed": changed("byte_level", normalized(normalizers.NFC())),
    "compatible": changed("byte_level", normalized(normalizers.NFKC(), normalizers.Lowercase())),
    "split": changed("byte_level", split(pre_tokenizers.Split(tokenizers.Regex(r"\d"), "isolated"))),
}
WORDS = st.sampled_from([*SENTENCES, *"각𝐀ﬃ①K ", "각", "  ", "\n", "<s>", "two words", "\U0001d400" * 9])
TEXTS = st.lists(st.one_of(WORDS, st.text(max_size=8)), min_size=1, max_size=20).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_no_token_represents_more_bytes_than_the_limit(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert tokenizer.max_bytes_per_token is not None
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
    assert len(text.encode()) <= num_tokens * tokenizer.max_bytes_per_token


def test_the_limit_includes_the_shrinking_of_unicode_normal_forms() -> None:
    text = unicodedata.normalize("NFD", "각") * 50
    plain, composed = TOKENIZERS["byte level"].max_bytes_per_token, TOKENIZERS["composed"].max_bytes_per_token
    assert plain is not None and composed == 4 * plain and len(text.encode()) == 9 * 50


@pytest.mark.parametrize(
    "tokenizer",
    [
        new_tokenizer("unigram"),
        new_tokenizer("word_piece"),
        changed("byte_level", normalized(normalizers.Strip())),
        changed("byte_level", normalized(normalizers.NFC(), normalizers.StripAccents())),
        changed("byte_level", normalized(normalizers.Replace(tokenizers.Regex(" +"), " "))),
        changed("byte_level", normalized(normalizers.Replace("  ", " "))),
        changed("byte_level", split(pre_tokenizers.WhitespaceSplit())),
        changed("byte_level", split(pre_tokenizers.Split(" ", "removed"))),
        changed("byte_level", lambda backend: backend.add_tokens([AddedToken("<|end|>", rstrip=True)])),
        changed("byte_fallback", lambda backend: setattr(backend.model, "byte_fallback", False)),
    ],
    ids=["unigram", "word piece", "strip", "accents", "regex", "spaces", "words", "removed", "rstrip", "unknown"],
)
def test_a_tokenizer_that_may_drop_text_has_no_limit(tokenizer: Tokenizer) -> None:
    assert tokenizer.max_bytes_per_token is None


def test_a_text_is_refused_only_if_its_tokens_cannot_fit() -> None:
    limits = PromptLimits(max_model_len=100, max_answers=1, max_tokens=1000, max_bytes_per_token=10)
    for text in ("x" * 1000, "ü" * 500, "x" * 101, ""):
        limits.check_text(text)
    for text in ("x" * 1001, "ü" * 501, "中" * 334):
        with pytest.raises(
            RequestError,
            match=r"length is 100 tokens.* bytes of text .* at least 101 tokens, .* shorten",
        ):
            limits.check_text(text)
    PromptLimits(max_model_len=100, max_answers=1, max_tokens=1000).check_text("x" * 10**6)
    with pytest.raises(RequestError, match="1001 bytes"):
        limits.check_characters(1001)


def test_cut_side_is_none_unless_the_truncation_fits_max_model_len() -> None:
    limits = PromptLimits(max_model_len=100, max_answers=1, max_tokens=1000)
    truncations = (None, -1, 1, 99, 100, 2**31 - 1)
    sides: tuple[tuple[CutSide | None, CutSide], ...] = ((None, "left"), ("left", "left"), ("right", "right"))
    for side, cut in sides:
        assert [limits.cut_side(each, side) for each in truncations] == [None, cut, cut, cut, cut, None]
    ids = [encode_ids(range(count)) for count in (99, 101)]
    assert [limits.kept(ids[0], cut) for _, cut in sides] == [ids[0]] * 3 and limits.kept(ids[1], None) == ids[1]
    assert limits.kept(ids[1], "left") == encode_ids(range(1, 101))
    assert limits.kept(ids[1], "right") == encode_ids(range(100))
