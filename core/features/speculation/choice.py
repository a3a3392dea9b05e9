"""DraftChoice: decides how many drafts a step gets, and whether it waits for the result of the step before, so that the
most tokens are generated per second.

Drafts follow known tokens, so they need the result of the step before. If two steps are in flight, waiting for each
result costs time in every step; this pays only if the drafts that can then be sent gain more than that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .step_costs import StepCosts

GAIN = 1.03  # factor in tokens per second, against steps without drafts, from which on drafts are sent
FIRST_PAUSE, LAST_PAUSE = 64, 1024  # choices between two that are made only to learn a cost
NUM_PLAIN = 4  # successive steps without drafts at such a choice, so that some are sent before the last result
_WEIGHT = 0.1  # of the newest step in the averages


class DraftChoice:
    """Owner of the step costs, and of moving averages of the tokens and the seconds of the best step that waits for the
    result of the one before it."""

    def __init__(self, most_draws: int, *, computes_twice: bool = False) -> None:
        """most_draws: largest number of tokens that a step may sample. computes_twice: accepted drafts are computed
        once more in the next step, since steps with drafts update no state."""
        self._computes_twice = computes_twice
        self.costs = StepCosts()
        self._most_draws = most_draws
        self._tokens = self._seconds = 0.0
        self._num_rows = 0  # of these averages
        self._num_choices, self._pause, self._num_plain = 0, FIRST_PAUSE, 0

    def on_result(self, num_rows: int, num_drafts: int, seconds: float | None, *, is_alone: bool) -> None:
        """Learn what a step has cost. seconds: None if that is unknown. is_alone: the step was sent after the result of
        the step before."""
        self._num_plain = max(self._num_plain - 1, 0)
        if seconds is not None:
            self.costs.on_step(num_rows, num_drafts, seconds, is_alone=is_alone)

    @property
    def is_learning(self) -> bool:
        """Whether the next steps are made only to learn the cost of steps without drafts."""
        return self._num_plain > 0

    def is_ready(self, num_rows: int) -> bool:
        """Return whether the cost of a step of `num_rows` rows without drafts is known."""
        return self.costs.plain_s(num_rows) is not None

    def waits(self, num_rows: int) -> bool:
        """Return whether steps of `num_rows` rows should wait for the result of the step before."""
        plain_s = self.costs.plain_s(num_rows)
        if plain_s is None or num_rows != self._num_rows or self._num_plain:
            return False
        return self._tokens * plain_s > GAIN * num_rows * self._seconds

    def pays(self, chances: Sequence[float], num_rows: int) -> bool:
        """Return whether a step with drafts generates more tokens per second than one without. chances: how likely each
        draft is right, the best first."""
        return not self._num_plain and self._best(chances, num_rows, is_alone=False)[0] > 0

    def consider(self, chances: Sequence[float], num_rows: int) -> None:
        """Update the averages with the drafts that a step could have if it waited for the step before."""
        _, tokens, seconds = self._best(chances, num_rows, is_alone=True)
        if num_rows != self._num_rows:
            self._num_rows, self._tokens = num_rows, float(num_rows)
            self._seconds = self.costs.alone_s(num_rows)
        self._tokens += _WEIGHT * (tokens - self._tokens)
        self._seconds += _WEIGHT * (seconds - self._seconds)

    def choose(self, chances: Sequence[float], num_rows: int) -> int:
        """Return how many of the drafts to send. Rarely this is another number than the best one, to learn its cost."""
        if self._num_plain:
            return 0
        is_alone = self.waits(num_rows)
        best = self._best(chances, num_rows, is_alone=is_alone)[0]
        if not chances and not is_alone:
            return 0
        self._num_choices += 1
        if self._num_choices < self._pause:
            return best
        self._num_choices, self._pause = 0, min(2 * self._pause, LAST_PAUSE)
        if best or is_alone:
            self._num_plain = NUM_PLAIN
            return 0
        return max(self._best(chances, num_rows, is_alone=False, least=1)[0], 0)

    def _best(
        self, chances: Sequence[float], num_rows: int, *, is_alone: bool, least: int = 0
    ) -> tuple[int, float, float]:
        """Return the best number of drafts, at least `least`, with the expected tokens and seconds of its step.
        is_alone: a step without drafts waits for the step before, too."""
        most = min(len(chances), self._most_draws - num_rows, self.costs.most_drafts(num_rows))
        seconds = np.array(self.costs.seconds(num_rows, max(most, 0)))
        if is_alone:
            seconds[0] = self.costs.alone_s(num_rows)
        tokens = num_rows + np.cumsum([0.0, *chances[: max(most, 0)]])
        if self._computes_twice:
            plain = np.array(self.costs.seconds(num_rows, max(most, 0)))
            seconds += np.interp(tokens - num_rows, np.arange(len(plain)), plain) - plain[0]
        rates = tokens / seconds
        best = int(rates[least:].argmax()) + least if len(rates) > least else 0
        if not least and rates[best] < GAIN * rates[0]:
            best = 0
        return best, float(tokens[best]), float(seconds[best])
