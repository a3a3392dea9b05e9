"""The cost of computing a prompt's tokens and of loading blocks from a source, learned while the engine runs."""

from __future__ import annotations

from collections import deque

MIN_SAMPLE = 64  # prompt tokens in a step to learn from
MAX_DECODES = 0.1  # decoding rows per prompt token, beyond which their part of the step is too large
_FADING = 0.95  # of older steps, with each new one
NUM_JOBS = 32  # that a source's rate is learned from


class ComputeCost:
    """Seconds for a prompt token: c0 + c1 · its position, as attention reads all tokens before it. The least squares
    of finished steps, new ones weighing more."""

    def __init__(self, token_s: float) -> None:
        """token_s: c0 until a step has told better; rather too little."""
        self._c0, self._c1 = token_s, 0.0
        self._nn = self._np = self._pp = self._nt = self._pt = 0.0

    def on_step(self, num_tokens: int, sum_of_positions: float, num_decodes: int, seconds: float) -> None:
        """Learn from a step that computed `num_tokens` tokens of prompts, and one token of `num_decodes` rows."""
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
    """How long a source takes for a load, of which it is told: the slow quartile of the last jobs."""

    def __init__(self) -> None:
        self._latencies: deque[float] = deque(maxlen=NUM_JOBS)
        self._block_times: deque[float] = deque(maxlen=NUM_JOBS)
        self.told_at = 0.0  # monotonic seconds of the last job

    def on_job(self, first_s: float, num_blocks: int, seconds: float, now: float) -> None:
        """Learn from a job: seconds to its first report, and to its end."""
        self._latencies.append(first_s)
        self._block_times.append(max(seconds - first_s, 0.0) / num_blocks if num_blocks > 1 else seconds)
        self.told_at = now

    def seconds(self, num_blocks: int) -> float:
        """Estimate the seconds to load blocks; 0 before the first job."""
        if not self._latencies:
            return 0.0
        return _slow(self._latencies) + num_blocks * _slow(self._block_times)


def _slow(values: deque[float]) -> float:
    return sorted(values)[len(values) * 3 // 4]
