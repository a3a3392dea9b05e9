"""RestartPolicy: the delay before a lost process is started again, and the limit of failures in a row."""

from __future__ import annotations

MAX_FAILURES = 6  # in a row, without a step in between
FIRST_DELAY_S = 0.0
SECOND_DELAY_S = 0.25  # doubles from here
MAX_DELAY_S = 5.0


class RestartPolicy:
    """Counts failures in a row; a finished step sets the count to 0."""

    def __init__(self) -> None:
        self.num_restarts = 0  # ever
        self._num_in_a_row = 0

    def on_failure(self) -> float | None:
        """Count a failure and return the seconds to wait before the next start; None: give up."""
        self._num_in_a_row += 1
        if self._num_in_a_row > MAX_FAILURES:
            return None
        self.num_restarts += 1
        if self._num_in_a_row == 1:
            return FIRST_DELAY_S
        return min(SECOND_DELAY_S * (1 << (self._num_in_a_row - 2)), MAX_DELAY_S)

    def on_progress(self) -> None:
        self._num_in_a_row = 0
