"""HangDetector: the time that a step may take before its workers count as hung.

It learns from finished steps: the longest time for each power of two of tokens. A step of k times as many tokens is
assumed to take at most k times as long, so each known size gives a bound. The limit is the smallest bound, times
MARGIN, and at least MIN_LIMIT_S; without a known size it is FIRST_LIMIT_S. Steps that score prompts over the whole
vocabulary are learned separately. A step that encodes media gets additional time, learned from such steps by their work
in the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ipc.process.awake_clock import AwakeClock
from .features.media.encode_throttle import StageWork
from .features.media.row_media import RowMedia
from .scheduling.prefill_throttle import PrefillThrottle
from .scheduling.step.ledger import LedgerEntry

MARGIN = 20.0  # a shared machine stalls a step by more than 10 × at times
MIN_LIMIT_S = 5.0
FIRST_LIMIT_S = 120.0  # before the first step
MAX_EXCUSES = 3  # times that the oldest step gets its full time limit again after a suspension


class HangDetector:
    """Estimator of a step's time limit. `fixed_s`: the operator's limit, which replaces the learned one."""

    def __init__(self, fixed_s: float | None = None) -> None:
        self._fixed_s = fixed_s
        # seconds, by whether prompts are scored and by the bit length of the token count
        self._longest_by_size: dict[bool, dict[int, float]] = {False: {}, True: {}}
        self._longest_by_work: dict[int, float] = {}  # of steps that encode media, by the bit length of their work

    def on_step(self, num_tokens: int, seconds: float, *, scores_prompts: bool = False, encode_work: int = 0) -> None:
        """Learn from a finished step. encode_work: sum of its StageWork; 0: it has encoded nothing."""
        longest = self._longest_by_work if encode_work else self._longest_by_size[scores_prompts]
        size = (encode_work or num_tokens).bit_length()
        longest[size] = max(seconds, longest.get(size, 0.0))

    def limit_s(self, num_tokens: int, *, scores_prompts: bool = False, encode_work: int = 0) -> float:
        if self._fixed_s is not None:
            return self._fixed_s
        limit_s = _limit_s(self._longest_by_size[scores_prompts], num_tokens)
        return limit_s + (_limit_s(self._longest_by_work, encode_work) if encode_work else 0.0)


def _limit_s(longest_by_size: dict[int, float], num_units: int) -> float:
    size = num_units.bit_length()
    if not longest_by_size:
        return FIRST_LIMIT_S
    bound = min(longest * (1 << max(size - known, 0)) for known, longest in longest_by_size.items())
    return max(MIN_LIMIT_S, MARGIN * bound)


def _sum_of(parts: Sequence[StageWork]) -> int:
    return max(int(sum(part.work for part in parts)), 1)


class StepTimer:
    """Timer of the oldest step in flight. It passes the times of finished steps to the detector and the throttles, and
    restarts the time limit after a suspension of this process."""

    def __init__(
        self, clock: AwakeClock, detector: HangDetector, prefill_throttle: PrefillThrottle, media: RowMedia
    ) -> None:
        self._clock, self._detector, self._encodes = clock, detector, media.encodes
        self._prefill_throttle, self._encode_throttle = prefill_throttle, media.throttle
        self._begun_at = clock.now  # when the wait for the oldest step began, or its limit was last restarted
        self._num_gaps = clock.num_gaps  # suspensions of this process that `look` has dealt with
        self._num_excuses = 0  # times that the oldest step's limit was restarted after a suspension
        self._last_untimed_step = 0  # steps up to this one may have been suspended

    def begin(self) -> None:
        """Restart the time of the oldest step in flight."""
        self._begun_at = self._clock.now

    def on_step(self, entry: LedgerEntry, seconds: float) -> None:
        """Restart the time for the next step in flight. Learn from the finished one, unless it computed nothing, or its
        `seconds` may include a suspension."""
        self._begun_at, self._num_excuses = self._clock.now, 0
        if entry.step <= self._last_untimed_step:
            return
        batch = entry.batch
        num_decodes, num_prompt_tokens = batch.num_tokens - batch.num_prompt_tokens, batch.num_prompt_tokens
        if entry.encodes:
            parts = self._encodes.work_of(entry.encodes)
            self._detector.on_step(batch.num_tokens, seconds, encode_work=_sum_of(parts))
            self._encode_throttle.on_step(num_decodes, num_prompt_tokens, parts, seconds)
        elif batch.num_tokens:
            self._detector.on_step(batch.num_tokens, seconds, scores_prompts=batch.scores_prompts)
            if not batch.drafts:  # rows with drafts are neither decodes nor prompts
                self._prefill_throttle.on_step(num_decodes, num_prompt_tokens, seconds)

    def look(self, last_step: int, *, has_step: bool) -> float:
        """Advance the clock and return its time. If this process was suspended, restart the limit of the oldest step in
        flight, if there is one, MAX_EXCUSES times at most; steps up to `last_step` are not learned from."""
        now = self._clock.look()
        if self._num_gaps != self._clock.num_gaps:
            self._num_gaps = self._clock.num_gaps
            self._last_untimed_step = last_step
            if has_step and self._num_excuses < MAX_EXCUSES:
                self._num_excuses += 1
                self.begin()
        return now

    def reset(self) -> None:
        """Forget suspensions and excuses: the steps of a new worker group count from 1."""
        self._last_untimed_step = self._num_excuses = 0

    def overdue_at(self, entry: LedgerEntry) -> float:
        """Return the time, by the clock, at which the oldest step in flight, `entry`, counts as hung."""
        batch, work = entry.batch, _sum_of(self._encodes.work_of(entry.encodes)) if entry.encodes else 0
        limit_s = self._detector.limit_s(batch.num_tokens, scores_prompts=batch.scores_prompts, encode_work=work)
        return self._begun_at + limit_s

    @property
    def age_s(self) -> float:
        """Seconds, by the clock, since the wait for the oldest step in flight began or its limit was restarted."""
        return self._clock.now - self._begun_at
