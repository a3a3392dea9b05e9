"""Costs, in seconds, of computing a prompt's tokens and of loading blocks from a source, learned as the engine runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

MIN_SAMPLE = 64  # prompt tokens in a step to learn from
MAX_DECODES = 0.1  # decoding rows per prompt token: with more, a step is not learned from
_FADING = 0.95  # factor of the weight of older steps, with each new one
NUM_TIMES = 32  # latest busy times of a source that its cost is computed from
NUM_COUNTED = 64  # blocks after which a long busy time is recorded, and counting starts again


class ComputeCost:
    """Estimate of the seconds for a prompt token: c0 + c1 · its position, since attention reads all tokens before it. A
    least-squares fit to finished steps, in which newer steps weigh more."""

    def __init__(self, token_s: float) -> None:
        """token_s: c0 until a step has been measured; better too small than too large."""
        self._c0, self._c1 = token_s, 0.0
        self._nn = self._np = self._pp = self._nt = self._pt = 0.0

    def on_step(self, num_tokens: int, sum_of_positions: float, num_decodes: int, seconds: float) -> None:
        """Learn from a step that computed `num_tokens` tokens of prompts, and one token of each of `num_decodes` rows,
        unless it has fewer than MIN_SAMPLE tokens of prompts or more than MAX_DECODES rows for each of them.
        sum_of_positions: of the prompts' tokens."""
        if num_tokens < MIN_SAMPLE or num_decodes > MAX_DECODES * num_tokens or seconds <= 0:
            return
        n, p = float(num_tokens), sum_of_positions
        self._nn = _FADING * self._nn + n * n
        self._np = _FADING * self._np + n * p
        self._pp = _FADING * self._pp + p * p
        self._nt = _FADING * self._nt + n * seconds
        self._pt = _FADING * self._pt + p * seconds
        determinant = self._nn * self._pp - self._np * self._np
        self._c0, self._c1 = self._nt / self._nn, 0.0
        if determinant > 1e-3 * self._nn * self._pp:
            c0 = (self._nt * self._pp - self._pt * self._np) / determinant
            c1 = (self._pt * self._nn - self._nt * self._np) / determinant
            if c0 > 0 and c1 >= 0:
                self._c0, self._c1 = c0, c1

    def seconds(self, start: int, end: int) -> float:
        """Return the seconds to compute the tokens [start, end) of one prompt."""
        return (end - start) * (self._c0 + self._c1 * (start + end) / 2)


class SourceCost:
    """Estimate of the seconds that a source takes for a load: a latency, and a time for each byte. Both are upper
    quartiles of the last NUM_TIMES samples: of the latencies, and of the bytes in the samples of the time for a byte.

    A busy time starts with an order to an idle source. Its first report with a loaded block gives a sample of the
    latency, and later reports give samples of the time for a byte, however the blocks were divided into orders. If
    there is no later one, the seconds for each byte of the first are a sample, too, provided that they lower the
    estimate or that there is no sample yet."""

    def __init__(self, block_bytes: int = 1) -> None:
        """block_bytes: size of a usual block."""
        self._latencies: deque[float] = deque(maxlen=NUM_TIMES)
        self._byte_times: deque[tuple[float, int]] = deque(maxlen=NUM_TIMES)  # seconds for a byte, and bytes
        self.told_at = 0.0  # monotonic seconds of the last block that came
        self._num_ordered = 0  # bytes that the source has not reported yet
        self._begun_at = self._first_at = 0.0  # of the busy time, and of the report from which bytes are counted
        self._num_counted = 0  # bytes since then
        self._most_counted = NUM_COUNTED * block_bytes

    def on_order(self, num_bytes: int, now: float) -> None:
        """Record that blocks of so many bytes were ordered from the source."""
        if not self._num_ordered:
            self._begun_at, self._first_at, self._num_counted = now, 0.0, 0
        self._num_ordered += num_bytes

    def on_report(self, num_good: int, num_bad: int, now: float) -> None:
        """Learn from a report of blocks that have come, and of others that will not, in bytes."""
        self._num_ordered -= num_good + num_bad
        is_first = not self._first_at
        self.told_at = now if num_good else self.told_at
        if is_first and num_good:
            self._latencies.append(now - self._begun_at)
            self._first_at = now
            most_s = (now - self._begun_at) / num_good
            if not self._num_ordered and (not self._byte_times or most_s < _slow_byte_s(self._byte_times)):
                self._byte_times.append((most_s, num_good))
        elif not is_first:
            self._num_counted += num_good
            if self._num_counted >= self._most_counted or (self._num_counted and not self._num_ordered):
                self._byte_times.append(((now - self._first_at) / self._num_counted, self._num_counted))
                self._first_at, self._num_counted = now, 0

    def on_lost(self) -> None:
        """Record that no report will come for the blocks that were ordered."""
        self._num_ordered = 0

    def seconds(self, num_bytes: int) -> float:
        """Estimate the seconds to load blocks of so many bytes; 0 until a first block has come."""
        if not self._latencies:
            return 0.0
        return sorted(self._latencies)[len(self._latencies) * 3 // 4] + num_bytes * _slow_byte_s(self._byte_times)


def _slow_byte_s(times: Iterable[tuple[float, int]]) -> float:
    """Return the upper quartile of the seconds that bytes took; 0 if none is known. times: (seconds for a byte, number
    of bytes) of each sample."""
    num_left = sum(count for _, count in times) / 4
    for seconds, count in sorted(times, reverse=True):
        num_left -= count
        if num_left < 0:
            return seconds
    return 0.0
