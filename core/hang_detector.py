"""HangDetector: how long a step may take before its workers count as hung.

Learned from finished steps: the longest time for each power of two of tokens. A step of k times the tokens takes at
most k times as long; the smallest bound of all known sizes, times a margin, is the limit, at least MIN_LIMIT_S. Steps
that score prompts over the whole vocabulary are learned separately.
"""

from __future__ import annotations

from ..ipc.process.awake_clock import AwakeClock
from .scheduling.batch import Batch
from .scheduling.prefill_throttle import PrefillThrottle

MARGIN = 20.0  # a shared machine stalls a step by more than 10 × at times
MIN_LIMIT_S = 5.0
FIRST_LIMIT_S = 120.0  # before the first step
MAX_EXCUSES = 3  # times that the oldest step gets its full time limit again after a suspension


class HangDetector:
    """Learns the time limit of a step. `fixed_s`: the operator's limit, which replaces the learned one."""

    def __init__(self, fixed_s: float | None = None) -> None:
        self._fixed_s = fixed_s
        # seconds, by whether prompts are scored and by the bit length of the token count
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


class StepTimer:
    """Times the oldest step in flight, and lets detector and throttle learn from finished ones. A suspension of this
    process excuses a step."""

    def __init__(self, clock: AwakeClock, detector: HangDetector, throttle: PrefillThrottle) -> None:
        self._clock, self._detector, self._throttle = clock, detector, throttle
        self._begun_at = clock.now  # when the wait for the oldest step began, or its limit was last restarted
        self._num_excuses = 0  # of the oldest step
        self._last_untimed_step = 0  # steps up to this one may have been suspended

    def begin(self) -> None:
        """Restart the time of the oldest step in flight."""
        self._begun_at = self._clock.now

    def on_step(self, step: int, batch: Batch, seconds: float) -> None:
        """Restart the time for the next step in flight. Learn from the finished one, unless it only copied blocks, or
        may have been suspended, so that its `seconds` mean nothing."""
        self._begun_at, self._num_excuses = self._clock.now, 0
        if step > self._last_untimed_step and batch.num_tokens:
            self._detector.on_step(batch.num_tokens, seconds, scores_prompts=batch.scores_prompts)
            self._throttle.on_step(batch.num_tokens - batch.num_prompt_tokens, batch.num_prompt_tokens, seconds)

    def on_suspended(self, last_step: int, *, has_step: bool) -> None:
        """Restart the limit of the oldest step in flight, if there is one, MAX_EXCUSES times at most; steps up to
        `last_step` are not learned from."""
        self._last_untimed_step = last_step
        if has_step and self._num_excuses < MAX_EXCUSES:
            self._num_excuses += 1
            self.begin()

    def reset(self) -> None:
        """Forget suspensions and excuses: the steps of a new worker group count from 1."""
        self._last_untimed_step = self._num_excuses = 0

    def overdue_at(self, batch: Batch) -> float:
        """Return when the oldest step, which is of this batch, counts as hung; by the clock."""
        return self._begun_at + self._detector.limit_s(batch.num_tokens, scores_prompts=batch.scores_prompts)

    @property
    def age_s(self) -> float:
        """Seconds, by the clock, since the wait for the oldest step in flight began or its limit was restarted."""
        return self._clock.now - self._begun_at
