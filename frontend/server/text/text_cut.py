"""TextCut: cuts a long text before it is tokenized, if a truncation keeps only one side of its tokens.

A safe place to cut is a space between two letters, if the tokenizer is BPE and no token contains a letter followed by a
space: no merge crosses the place, so each side by itself has the same tokens. A prefix that the tokenizer puts before a
text changes at most the first word of the right side; hence another safe place must follow.
"""

from __future__ import annotations

import re

import tokenizers

from ....ipc.params.sampling_params import CutSide

_PLACE = re.compile("[A-Za-z](?= [A-Za-z])")
_IN_TOKEN = re.compile("[A-Za-z][ Ġ▁]")  # a letter and a space, as the three kinds of vocabularies spell it
SEARCHED_CHARACTERS = 64 << 10  # length of the part that is searched for a safe place
NEAR_CHARACTERS = 4096  # distance within which another safe place must follow
WINDOW = 128  # characters on each side of a place that the pre-tokenizer gets


class TextCut:
    """Cutter of texts for one tokenizer. A text stays whole if a cut could change the tokens that are kept."""

    def __init__(self, backend: tokenizers.Tokenizer, max_bytes_per_token: int) -> None:
        self._backend = backend
        self._max_bytes_per_token = max_bytes_per_token
        self._may_cut = not any(map(_IN_TOKEN.search, backend.get_vocab(with_added_tokens=True)))

    def kept(self, text: str, num_tokens: int, cut_side: CutSide) -> str:
        """Return `text`, shortened at `cut_side`: the last ("left") or first ("right") `num_tokens` tokens stay the
        same. Return all of `text` if no place is safe."""
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
        """Return whether the pre-tokenizer splits `window` in its middle."""
        pre_tokenizer = self._backend.pre_tokenizer
        if pre_tokenizer is None:
            return True
        return any(begin == WINDOW for _, (begin, _) in pre_tokenizer.pre_tokenize_str(window))
