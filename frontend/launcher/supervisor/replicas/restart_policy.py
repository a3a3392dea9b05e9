"""RestartPolicy: the delay before a lost process is started again, and the limit of consecutive failures."""

from __future__ import annotations

DELAYS_S = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)  # after the 1st, 2nd, … of consecutive failures without a step in between
MAX_FAILURES, MAX_DELAY_S = len(DELAYS_S), DELAYS_S[-1]


class RestartPolicy:
    """Counter of consecutive failures. A finished step or a served answer resets it, and so does a process that ran for
    `steady_s`, if that is given."""

    def __init__(self, steady_s: float | None = None, *, counts_steps: bool = True) -> None:
        """counts_steps: whether finished steps show that the process works."""
        self._steady_s, self._counts_steps = steady_s, counts_steps
        self.delays_s = DELAYS_S
        self.num_restarts = 0  # since the engine's start
        self._num_in_a_row = 0

    def on_failure(self, ran_s: float | None = 0.0) -> float | None:
        """Count a failure of a process that ran for `ran_s`, and return the seconds to wait before the next start;
        None: give up.

        `ran_s` None means that the process was lost with its host. That counts as a restart but not as a failure, and
        the last failure is no longer counted, since it may have been the first sign of the host's loss."""
        if ran_s is None:
            self.num_restarts += 1
            self._num_in_a_row = max(self._num_in_a_row - 1, 0)
            return 0.0
        if self._steady_s is not None and ran_s >= self._steady_s:
            self._num_in_a_row = 0
        if self._num_in_a_row == MAX_FAILURES:
            return None
        self.num_restarts += 1
        self._num_in_a_row += 1
        return self.delays_s[self._num_in_a_row - 1]

    def on_progress(self) -> None:
        """Reset the count after a finished step or a served answer."""
        if self._counts_steps:
            self._num_in_a_row = 0
