"""ThinkingBudget: limits the tokens of a row's reasoning, and forces its end marker at the limit.

Reasoning starts after a begin marker and ends with an end marker, each of one or more tokens; it may start in the
prompt. A begin marker inside reasoning has no effect. If a grammar applies to a part of the output, reasoning counts
only before that part: the tokens at which it begins are a stop. The state depends only on the row's tokens, so a row
that is resumed after a preemption or a restart continues unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..machine.arrays import I32, I64


class ThinkingBudget:
    """Reasoning state of one row. Invariant: `_num_thought` is the number of tokens since reasoning began; None outside
    of reasoning."""

    def __init__(
        self,
        budget: int,
        begin: list[int],
        end: list[int],
        tokens: I32,
        stops: Sequence[list[int]] = (),
        num_prompt_tokens: int = 0,
    ) -> None:
        """`tokens`: the row's prompt and output so far, whose output has none of `stops`. Without a `begin` reasoning
        begins with the output."""
        self._budget, self._begin, self._end, self._stops = budget, begin, end, stops
        last_end = max(positions_after(tokens, end), default=0)
        begun_at = positions_after(tokens[last_end:], begin)
        if not begin:
            at = np.array([num_prompt_tokens - last_end], np.int64)
            begun_at = at[at >= 0]
        self._num_thought = len(tokens) - last_end - int(begun_at[0]) if len(begun_at) else None
        self._num_recent = max(map(len, (begin, end, *stops)))
        self._recent: list[int] = tokens[-self._num_recent :].tolist()

    def append(self, token_id: int) -> bool:
        """Append a token of the output; return whether it completes a stop. Then no reasoning counts any more."""
        self._recent.append(token_id)
        del self._recent[: -self._num_recent]
        if self._num_thought is None:
            self._num_thought = 0 if self._recent[-len(self._begin) :] == self._begin else None
        else:
            has_ended = self._recent[-len(self._end) :] == self._end
            self._num_thought = None if has_ended else self._num_thought + 1
        return any(self._recent[-len(stop) :] == stop for stop in self._stops)

    def forced(self) -> int | None:
        """Return the next token of the end marker if the row is in reasoning and its budget is used up, else None."""
        if self._num_thought is None or self._num_thought < self._budget:
            return None
        begun = (n for n in range(len(self._end) - 1, 0, -1) if self._recent[-n:] == self._end[:n])
        return self._end[next(begun, 0)]


def positions_after(tokens: I32, marker: list[int]) -> I64:
    """Return the positions right after each occurrence of a marker, in order."""
    num_places = max(len(tokens) - len(marker) + 1, 0)
    is_here = np.ones(num_places, np.bool_)
    for i, token_id in enumerate(marker):
        is_here &= tokens[i : i + num_places] == token_id
    return np.flatnonzero(is_here) + len(marker)
