"""AskRates: whether steps that ask for drafts of the draft model give more tokens per second than others.

Rates are kept by the number of rows, doubling: a draft model that helps one row may hold up many.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....ipc.messages.workers import DraftWork
from ...scheduling.prefill_throttle import blend
from .choice import GAIN

NUM_FIRST = 8  # steps of each kind that are measured before they are compared
NUM_TRIAL = 6  # steps of the kind that was slower, to measure it again
FIRST_PAUSE, LAST_PAUSE = 64, 1024  # steps between two such trials
_WEIGHT = 0.1  # of the newest step in the averages


class _Rate:
    """Moving averages of the tokens and the seconds of steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.tokens = self.seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        weight = max(_WEIGHT, 1 / (self.num_steps + 1))
        self.num_steps += 1
        self.tokens += weight * (num_tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(eq=False)
class _Size:
    """Rates and costs of one size of batch."""

    asking: _Rate
    other: _Rate
    pass_s: float = 0.0  # of one pass through the draft model; 0: unknown
    num_until_trial: int = FIRST_PAUSE
    pause: int = FIRST_PAUSE


class AskRates:
    """Owner of the rates, and of the times of trials."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def _of(self, num_rows: int) -> _Size:
        return self._sizes.setdefault(num_rows.bit_length(), _Size(_Rate(), _Rate()))

    def should_ask(self, num_rows: int) -> bool:
        """Return whether the next step of `num_rows` rows should ask."""
        size = self._of(num_rows)
        if size.other.num_steps < NUM_FIRST:
            return False
        if size.asking.num_steps < NUM_FIRST:
            return True
        return self._is_better(size)

    def _is_better(self, size: _Size) -> bool:
        return size.asking.per_second > GAIN * size.other.per_second

    def on_step(self, num_rows: int, num_tokens: int, seconds: float, work: DraftWork | None) -> None:
        """Learn from a step of decoding rows, and the one before it, which both asked or both did not. work: None: they
        did not."""
        size = self._of(num_rows)
        rate = size.other if work is None else size.asking
        was_better = self._is_better(size)
        rate.add(num_tokens, seconds)
        if work is not None and work.num_passes:
            size.pass_s = blend(size.pass_s or None, work.duration_s / work.num_passes, _WEIGHT)
        if min(size.asking.num_steps, size.other.num_steps) < NUM_FIRST:
            return
        is_better = self._is_better(size)
        size.num_until_trial -= 1
        if is_better != was_better:
            size.pause = size.num_until_trial = FIRST_PAUSE
        elif size.num_until_trial <= 0:
            slower = size.other if is_better else size.asking
            slower.num_steps = NUM_FIRST - NUM_TRIAL  # so that few steps count as much as all before
            size.pause = size.num_until_trial = min(2 * size.pause, LAST_PAUSE)

    def least_chance(self, num_rows: int, plain_s: float, marginal_s: float) -> float:
        """Return how likely all drafts of a row must be right for another pass to pay: it costs a share of the pass and
        a draft in the next step, and the same time gives tokens without it. marginal_s: seconds that a draft adds to a
        step."""
        size = self._of(num_rows)
        rate = max(size.asking.per_second, num_rows / plain_s)
        return min(rate * (size.pass_s / num_rows + marginal_s), 0.9)
