"""TextCut: cuts a long text before it is tokenized, if only one side of its tokens is needed.

A safe place to cut is a space between two letters, if no token contains a letter followed by a space, and the tokenizer
is BPE, or splits the text there: so each side by itself has the same tokens. A prefix that the tokenizer puts before a
text changes at most the first word of the right side; hence another safe place must follow.

How much text must be kept follows from the bytes that one token can represent. Where they have no bound, as with
WordPiece, which drops spaces, the tokens of the kept part are counted.
"""

from __future__ import annotations

import re

import tokenizers
from tokenizers.models import Unigram, WordPiece

from ....ipc.params.sampling_params import CutSide
from .token_bytes import parts_of

# Normalizers that treat a space between two letters, and the words beside it, by themselves
_LOCAL = frozenset(
    ("BertNormalizer", "Precompiled", "StripAccents", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Strip", "Prepend")
)
_JOINS_SPACES = {"Regex": " {2,}"}

_PLACE = re.compile("[A-Za-z](?= [A-Za-z])")
_IN_TOKEN = re.compile("[A-Za-z][ Ġ▁]")  # a letter and a space, as the three kinds of vocabularies spell it
SEARCHED_CHARACTERS = 64 << 10  # length of the part that is searched for a safe place
NEAR_CHARACTERS = 4096  # distance within which another safe place must follow
WINDOW = 128  # characters on each side of a place that the pre-tokenizer gets
LIKELY_BYTES = 8  # of a token, where they have no bound: the part that is tried first
GROWTH = 4  # of that part, if it has too few tokens


class TextCut:
    """Cutter of texts for one tokenizer. A text stays whole if a cut could change the tokens that are kept."""

    def __init__(self, backend: tokenizers.Tokenizer, max_bytes_per_token: int | None) -> None:
        """`max_bytes_per_token`: None if they have no bound."""
        self._backend = backend
        self._max_bytes_per_token = max_bytes_per_token
        self._may_cut = max_bytes_per_token is not None or reads_words(backend)
        if self._may_cut:
            self._may_cut = not any(map(_IN_TOKEN.search, backend.get_vocab(with_added_tokens=True)))

    def kept(self, text: str, num_tokens: int, cut_side: CutSide) -> str:
        """Return `text`, shortened at `cut_side`: the last ("left") or first ("right") `num_tokens` tokens stay the
        same. Return all of `text` if no place is safe."""
        if self._max_bytes_per_token is not None:
            return self._part(text, num_tokens * self._max_bytes_per_token, cut_side)
        num_bytes = num_tokens * LIKELY_BYTES
        part = self._part(text, num_bytes, cut_side)
        while len(part) < len(text) and self._num_certain(part, cut_side) < num_tokens:
            num_bytes *= GROWTH
            part = self._part(text, num_bytes, cut_side)
        return part

    def _part(self, text: str, num_bytes: int, cut_side: CutSide) -> str:
        """Return the part of `text` that is kept, more than `num_bytes` long; all of it if no place is safe."""
        needed = num_bytes + 2 * NEAR_CHARACTERS
        end = needed + SEARCHED_CHARACTERS if cut_side == "right" else len(text) - needed
        begin = end - SEARCHED_CHARACTERS
        if not self._may_cut or begin < 0 or end > len(text):
            return text
        places = [found.end() for found in _PLACE.finditer(text, begin, end)]
        for place in places[:8] if cut_side == "right" else reversed(places[-8:]):
            if not self._splits(text[place - WINDOW : place + WINDOW]):
                continue
            if cut_side == "right":
                return text[:place]
            if _PLACE.search(text, place + 2, end + NEAR_CHARACTERS):
                return text[place:]
        return text

    def _num_certain(self, part: str, cut_side: CutSide) -> int:
        """Return how many tokens of a kept part are those of the whole text."""
        if cut_side == "left" and (second := _PLACE.search(part, 2)) is not None:
            part = part[second.end() :]
        return len(self._backend.encode(part, add_special_tokens=False).ids)

    def _splits(self, window: str) -> bool:
        """Return whether the pre-tokenizer splits `window` in its middle."""
        pre_tokenizer = self._backend.pre_tokenizer
        if pre_tokenizer is None:
            return True
        pieces = pre_tokenizer.pre_tokenize_str(window)
        return not any(begin < WINDOW < end for _, (begin, end) in pieces)


def reads_words(backend: tokenizers.Tokenizer) -> bool:
    """Return whether the tokens of a word depend on no other word: the model is WordPiece or Unigram behind a
    pre-tokenizer, and the normalizer changes each word by itself."""
    if backend.pre_tokenizer is None or not isinstance(backend.model, WordPiece | Unigram):
        return False
    normalizers = parts_of(backend.normalizer, "normalizers")
    return all(part["type"] in _LOCAL or part.get("pattern") == _JOINS_SPACES for part in normalizers)
