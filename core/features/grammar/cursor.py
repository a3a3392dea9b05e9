"""GrammarCursor: the position of one answer in its grammar, and the tokens that must follow.

If the mask leaves one token, that token needs no sampling: the matcher advances past it and such tokens after it, until
several are allowed, or it is MAX_AHEAD tokens ahead, or AHEAD_S have passed. The answer's tokens catch up later, one by
one; until then the matcher is ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from .compiler import Matcher, Words

MAX_AHEAD = 64  # jump-forward tokens at once
AHEAD_S = 0.02  # CPU time after which a look ahead ends: the masks of other answers wait for it
MASK_S = 0.1  # CPU time that a mask may take; the slowest of everyday schemas take 0.02
MAX_OVERTIME_S = 0.4  # CPU time that all masks so far may take beyond MASK_S each


class GrammarCursor:
    """Owner of the matcher. Invariant: it has consumed the answer's tokens, and then `ahead`: the tokens that the
    grammar forces next. `overtime_s`: CPU time of the masks beyond MASK_S each."""

    def __init__(self, matcher: Matcher, vocab_size: int, thread_time: Callable[[], float] = time.thread_time) -> None:
        """vocab_size: the model's; that of the matcher may be larger."""
        self._matcher, self._thread_time = matcher, thread_time
        self._vocab_size = vocab_size
        self.ahead: list[int] = []  # the next tokens, without alternatives
        self._known_mask: Words | None = None  # mask of the token after `ahead`, if it was made
        self.overtime_s = 0.0
        self.is_watched = False  # its next mask is made, and timed, alone: some mask was slow

    def take(self, token_id: int) -> None:
        """Advance by a token of the answer; AssertionError if `ahead` begins with another one."""
        if not self.ahead:
            self._known_mask = None
            self._matcher.consume([token_id])
        elif self.ahead.pop(0) != token_id:
            raise AssertionError(f"token {token_id} came where the grammar allows another one alone")

    @property
    def repeats(self) -> bool:
        return self._matcher.start is not None

    @property
    def is_complete(self) -> bool:
        """Whether the answer's tokens complete the grammar."""
        return not self.ahead and self._matcher.is_complete

    def restart(self) -> None:
        """Go back to the start of a grammar that repeats. The CPU time so far still counts."""
        start = self._matcher.start
        assert start is not None, "only a grammar that repeats has its start"
        self._matcher = start.copy()
        self._matcher.start = start
        self.ahead = []
        self._known_mask = None

    def spend(self, seconds: float, num_masks: int) -> None:
        """Count the CPU time of `num_masks` masks, or of a token if there are none. Quick masks make up for slow
        ones."""
        self.overtime_s = max(0.0, self.overtime_s + seconds - num_masks * MASK_S)

    @property
    def is_too_slow(self) -> bool:
        return self.overtime_s > MAX_OVERTIME_S

    @property
    def has_stopped(self) -> bool:
        """Whether the answer's tokens complete the grammar or have led to an error. Quick to compute."""
        return not self.ahead and self._matcher.has_stopped

    @property
    def error(self) -> str | None:
        return None if self.ahead else self._matcher.error

    @property
    def unmasked(self) -> Matcher | None:
        """The matcher, if it must make the next mask; None if that mask is known."""
        return None if self.ahead or self._known_mask is not None else self._matcher

    def finish_mask(self, words: Words) -> None:
        """Write the next token's mask to `words` if it is known; else `words` must hold it already. Then look ahead
        from that mask, unless tokens are ahead already."""
        if self.ahead:
            words[:] = 0
            words[self.ahead[0] // 32] = np.uint32(1 << self.ahead[0] % 32)
            return
        if self._known_mask is not None:
            words[:] = self._known_mask
        self._look_ahead(words)

    def draft_masks(self, words: Words, token_ids: Sequence[int]) -> list[Words]:
        """Return the masks after each of `token_ids`, up to the first token that is not allowed or that lets no token
        follow. The position does not change. words: the next token's mask, as completed by `finish_mask`."""
        masks = list[Words]()
        walker: Matcher | None = None
        for i, token_id in enumerate(token_ids):
            if not int(words[token_id // 32]) >> token_id % 32 & 1:
                break
            words = np.zeros_like(words)
            if i + 1 < len(self.ahead):
                words[self.ahead[i + 1] // 32] = np.uint32(1 << self.ahead[i + 1] % 32)
            elif i + 1 == len(self.ahead):
                if self._known_mask is None or not self._known_mask.any():
                    break
                words[:] = self._known_mask[: len(words)]
            else:
                walker = walker or self._matcher.copy()
                walker.consume([token_id])
                if walker.has_stopped:
                    break
                walker.fill(words)
            masks.append(words)
        return masks

    def _look_ahead(self, words: Words) -> None:
        """Advance the matcher past tokens without an alternative, at most MAX_AHEAD and for AHEAD_S, and add them to
        `ahead`. words: the mask of the next token."""
        until = self._thread_time() + AHEAD_S
        while (token_id := self._single(words)) is not None and len(self.ahead) < MAX_AHEAD:
            self.ahead.append(token_id)
            self._matcher.consume([token_id])
            self._known_mask = None
            if self._matcher.has_stopped:
                return
            self._known_mask = words = np.zeros_like(words)  # stays so after an error, which is reported with its token
            self._matcher.fill(words)
            if self._thread_time() > until:
                return

    def _single(self, words: Words) -> int | None:
        """Return the only token that a mask allows; None if it allows none or several, or one that is not in the
        model's vocabulary."""
        used = np.flatnonzero(words)
        if len(used) != 1:
            return None
        word = int(words[used[0]])
        token_id = int(used[0]) * 32 + word.bit_length() - 1
        return None if word & (word - 1) or token_id >= self._vocab_size else token_id
