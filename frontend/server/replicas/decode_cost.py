"""DecodeCost: how many seconds an answer takes longer for each other answer at its core, learned from finished ones."""

from __future__ import annotations

FORGET = 0.995  # for each finished answer
MIN_SHARE = 0.01  # of an answer's decode time, for each other answer: the least that is assumed


class DecodeCost:
    """Owns running sums of a straight line: seconds between tokens over the open answers of the core."""

    def __init__(self) -> None:
        self._sums = [0.0] * 6  # answers, rows, rows², seconds between tokens, rows × that, output tokens
        self.row_s = 0.0

    def on_finished(self, num_open: int, num_tokens: int, seconds: float) -> None:
        """Learn from an answer of `num_tokens` that took `seconds` after its first token, beside others."""
        if num_tokens < 2:
            return
        between_s = seconds / (num_tokens - 1)
        new = (1.0, num_open, num_open**2, between_s, num_open * between_s, num_tokens)
        self._sums = [FORGET * old + each for old, each in zip(self._sums, new, strict=True)]
        count, *sums = self._sums
        rows, squares, between_s, products, num_tokens_ = (each / count for each in sums)
        variance = squares - rows * rows
        slope = (products - rows * between_s) / variance if variance > 0.25 else 0.0
        self.row_s = num_tokens_ * max(slope, MIN_SHARE * between_s)
