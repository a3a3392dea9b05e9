"""How long a step may take before its workers are taken to hang.

Learned from the steps that came back: for each power of two of tokens the longest time seen. A step of k times the
tokens takes at most k times as long, so the least of the bounds that the known sizes give is used, times a margin.
Steps that score prompts over the whole vocabulary are a kind of their own: others say nothing of them.
"""

from __future__ import annotations

MARGIN = 20.0  # a shared machine stalls a step by more than 10 × at times
MIN_LIMIT_S = 5.0
FIRST_LIMIT_S = 120.0  # nothing is known yet


class HangDetector:
    """Seconds in, seconds out. `fixed_s` is the operator's own limit, if any."""

    def __init__(self, fixed_s: float | None = None) -> None:
        self._fixed_s = fixed_s
        # by whether prompts are scored, by the bit length of the token count: seconds
        self._longest_by_size: dict[bool, dict[int, float]] = {False: {}, True: {}}

    def on_step(self, num_tokens: int, seconds: float, *, scores_prompts: bool = False) -> None:
        size, longest_by_size = num_tokens.bit_length(), self._longest_by_size[scores_prompts]
        longest_by_size[size] = max(seconds, longest_by_size.get(size, 0.0))

    def limit_s(self, num_tokens: int, *, scores_prompts: bool = False) -> float:
        if self._fixed_s is not None:
            return self._fixed_s
        longest_by_size, size = self._longest_by_size[scores_prompts], num_tokens.bit_length()
        if not longest_by_size:
            return FIRST_LIMIT_S
        bound = min(longest * (1 << max(size - known, 0)) for known, longest in longest_by_size.items())
        return max(MIN_LIMIT_S, MARGIN * bound)
