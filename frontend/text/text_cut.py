"""The end or the begin of a text that a truncated prompt needs, whose tokens do not depend on what is cut off.

Such a place is a space between two letters, for a tokenizer by byte pairs none of whose tokens holds a letter and then
a space: no pair is ever merged across it, so that both sides have the tokens that they have alone. What the tokenizer
puts before a text changes at most the first word of an end; another such place must follow it.
"""

from __future__ import annotations

import re

import tokenizers

from ...ipc.sampling_params import CutSide

_PLACE = re.compile("[A-Za-z](?= [A-Za-z])")
_IN_TOKEN = re.compile("[A-Za-z][ Ġ▁]")  # a letter and then a space, as the three kinds of vocabularies write it
SEARCHED_CHARACTERS = 64 << 10  # for the place
NEAR_CHARACTERS = 4096  # how far the next place may be, about
WINDOW = 128  # characters on each side of a place on which the pre-tokenizer must split there


class TextCut:
    """Of one tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer, max_bytes_per_token: int) -> None:
        self._backend = backend
        self._max_bytes_per_token = max_bytes_per_token
        self._may_cut = not any(map(_IN_TOKEN.search, backend.get_vocab(with_added_tokens=True)))

    def kept(self, text: str, num_tokens: int, cut_side: CutSide) -> str:
        """The other side of `text`, which has the same last or first `num_tokens` tokens and is not much longer; or all
        of it."""
        needed = num_tokens * self._max_bytes_per_token + 2 * NEAR_CHARACTERS
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

    def _splits(self, window: str) -> bool:
        """Whether the pre-tokenizer splits this in its middle."""
        pre_tokenizer = self._backend.pre_tokenizer
        if pre_tokenizer is None:
            return True
        return any(begin == WINDOW for _, (begin, _) in pre_tokenizer.pre_tokenize_str(window))
