"""ThinkingBudget: how many tokens a thought of one row may have, and the tokens that end it then.

A thought begins after one marker and ends with another, each one token or more; the prompt may leave one open. A marker
for the beginning inside a thought begins no other. All of it follows from the row's tokens, so that a row that comes
back after a preemption or a restart goes on as it would have.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


class ThinkingBudget:
    """Invariant: `_num_thought` counts the tokens since the thought began; None: there is none."""

    def __init__(self, budget: int, begin: list[int], end: list[int], tokens: npt.NDArray[np.int32]) -> None:
        """`tokens` are the row's so far."""
        self._budget, self._begin, self._end = budget, begin, end
        last_end = max(places_after(tokens, end), default=0)
        begun_at = places_after(tokens[last_end:], begin)
        self._num_thought = len(tokens) - last_end - int(begun_at[0]) if len(begun_at) else None
        self._num_recent = max(len(begin), len(end))
        self._recent: list[int] = tokens[-self._num_recent :].tolist()

    def append(self, token_id: int) -> bool:
        """One more token of the row; whether it ends a thought."""
        self._recent.append(token_id)
        del self._recent[: -self._num_recent]
        if self._num_thought is None:
            self._num_thought = 0 if self._recent[-len(self._begin) :] == self._begin else None
            return False
        has_ended = self._recent[-len(self._end) :] == self._end
        self._num_thought = None if has_ended else self._num_thought + 1
        return has_ended

    def forced(self) -> int | None:
        """The only token that may come next; None if the thought may go on, or there is none."""
        if self._num_thought is None or self._num_thought < self._budget:
            return None
        begun = (n for n in range(len(self._end) - 1, 0, -1) if self._recent[-n:] == self._end[:n])
        return self._end[next(begun, 0)]


def places_after(tokens: npt.NDArray[np.int32], marker: list[int]) -> I64:
    """Where the tokens stand that follow a marker, in order."""
    num_places = max(len(tokens) - len(marker) + 1, 0)
    is_here = np.ones(num_places, np.bool_)
    for i, token_id in enumerate(marker):
        is_here &= tokens[i : i + num_places] == token_id
    return np.flatnonzero(is_here) + len(marker)
