"""Where one answer stands in its grammar, and the tokens that must follow from there.

Where the mask leaves one token, that token needs no draw: the matcher goes on past it, and past all that follow so,
until there is a choice again. The tokens of the answer catch up later, one by one; until then the matcher is ahead.
"""

from __future__ import annotations

import numpy as np

from .compiler import Matcher, Words

MAX_AHEAD = 64  # forced tokens told at once: what bounds the time of one look ahead


class GrammarCursor:
    """Owns the matcher. Invariant: it stands after the answer's tokens and `ahead`."""

    def __init__(self, matcher: Matcher, vocab_size: int) -> None:
        """`vocab_size` is the model's; the matcher's may be larger."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self.ahead: list[int] = []  # the next tokens: there is no choice
        self._known_mask: Words | None = None  # of the token after `ahead`

    def take(self, token_id: int) -> None:
        """The answer has got this token."""
        if not self.ahead:
            self._known_mask = None
            self._matcher.consume([token_id])
        elif self.ahead.pop(0) != token_id:
            raise AssertionError(f"token {token_id} came where the grammar allows another one alone")

    @property
    def has_stopped(self) -> bool:
        """It is complete, or there is an error: the cheap question."""
        return not self.ahead and self._matcher.has_stopped

    @property
    def error(self) -> str | None:
        return None if self.ahead else self._matcher.error

    @property
    def unmasked(self) -> Matcher | None:
        """The matcher, if the next mask is to be made by it."""
        return None if self.ahead or self._known_mask is not None else self._matcher

    def finish_mask(self, words: Words) -> None:
        """Write the mask that is known already, or look ahead from the one that was just made. words: its bits."""
        if self.ahead:
            _write_single(words, self.ahead[0])
            return
        if self._known_mask is not None:
            words[:] = self._known_mask
        self._look_ahead(words)

    def _look_ahead(self, words: Words) -> None:
        """words: the mask of the next token."""
        while (token_id := self._single(words)) is not None and len(self.ahead) < MAX_AHEAD:
            self.ahead.append(token_id)
            self._matcher.consume([token_id])
            self._known_mask = None
            if self._matcher.has_stopped:
                return
            self._known_mask = words = np.zeros_like(words)  # stays so after an error, which is told in its turn
            self._matcher.fill(words)

    def _single(self, words: Words) -> int | None:
        """The one token that a mask leaves; None if there are others or none."""
        used = np.flatnonzero(words)
        if len(used) != 1:
            return None
        word = int(words[used[0]])
        token_id = int(used[0]) * 32 + word.bit_length() - 1
        return None if word & (word - 1) or token_id >= self._vocab_size else token_id


def _write_single(words: Words, token_id: int) -> None:
    words[:] = 0
    words[token_id // 32] = np.uint32(1 << token_id % 32)
