"""The kept side of a cut text has the same tokens as in the whole text."""

from __future__ import annotations

import random

import pytest
import tokenizers

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.params.sampling_params import CutSide
from tokenloom.tests.frontend.server.text.samples import SENTENCES, backend_json, new_tokenizer

NUM_TOKENS = 300


def load_demo() -> Tokenizer:
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    assert tokenizer is not None
    return tokenizer


def long_text(seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(SENTENCES) for _ in range(3000))


KINDS = {
    "byte level": load_demo(),
    **{kind: new_tokenizer(kind) for kind in ("byte_fallback", "unigram", "word_piece", "metaspace_first")},
}


@pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS)
def test_both_sides_of_a_cut_have_the_tokens_of_the_whole_text(tokenizer: Tokenizer) -> None:
    for seed in range(4):
        text = long_text(seed) + SENTENCES[seed][:seed]
        end, begin = tokenizer.kept(text, NUM_TOKENS, "left"), tokenizer.kept(text, NUM_TOKENS, "right")
        assert text.endswith(end) and text.startswith(begin) and max(len(end), len(begin)) < len(text) / 4
        assert tokenizer.encode(end)[-NUM_TOKENS:] == tokenizer.encode(text)[-NUM_TOKENS:]
        assert tokenizer.encode(begin)[:NUM_TOKENS] == tokenizer.encode(text)[:NUM_TOKENS]


@pytest.mark.parametrize("cut_side", ["left", "right"])
@pytest.mark.parametrize("text", ["x" * 200_000, "1 2 3 " * 40_000, "a\n" * 100_000, "a b " * 100], ids=len)
def test_a_text_without_a_safe_place_is_not_cut(text: str, cut_side: CutSide) -> None:
    assert load_demo().kept(text, NUM_TOKENS, cut_side) == text


def test_a_tokenizer_with_tokens_across_spaces_never_cuts() -> None:
    text = long_text(0)  # this kind has the added token "two words"
    assert new_tokenizer("byte_level").kept(text, NUM_TOKENS, "left") == text


@pytest.mark.parametrize("cut_side", ["left", "right"])
@pytest.mark.parametrize("kind", ["unigram", "word_piece"])
def test_words_that_become_few_tokens_are_kept_until_there_are_enough(kind: str, cut_side: CutSide) -> None:
    tokenizer = new_tokenizer(kind)
    text = f"a {'ж' * 900} b " * 2000  # unknown words: few tokens of many characters
    part = tokenizer.kept(text, NUM_TOKENS, cut_side)
    assert 8 * len(part) < len(text)
    whole = tokenizer.encode(text)
    kept = tokenizer.encode(part)
    if cut_side == "left":
        assert kept[-NUM_TOKENS:] == whole[-NUM_TOKENS:]
    else:
        assert kept[:NUM_TOKENS] == whole[:NUM_TOKENS]


def test_a_normalizer_that_changes_words_by_their_neighbours_prevents_cuts() -> None:
    backend = tokenizers.Tokenizer.from_str(backend_json("word_piece"))
    backend.normalizer = tokenizers.normalizers.Replace("a b", "ab")
    assert Tokenizer.from_backend(backend, {}).kept(long_text(0), NUM_TOKENS, "left") == long_text(0)
