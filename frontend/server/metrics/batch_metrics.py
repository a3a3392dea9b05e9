"""BatchMetrics: metrics of batches. Only engines with a state folder have them; frontend 0 counts them."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable

from .registry import Counter, Gauge, Metric, Readings

OPEN = ("validating", "in_progress", "finalizing", "cancelling")


class BatchMetrics:
    """Owner of the counters and gauges of batches."""

    def __init__(self) -> None:
        self._num_by_status: Counts[str] = Counts()
        self._num_open_lines = 0
        self.lines = Counter("batch_lines_total", "Lines of batches that have ended.", ["outcome"])
        self.tokens = Counter("batch_tokens_total", "Tokens of ended lines of batches, by kind.", ["kind"])
        self.gauges: list[Metric] = [
            Gauge("batches_open", "Batches that are not over, by status.", self._open_batches),
            Gauge("batch_lines_running", "Lines of batches whose requests were sent.", self._open_lines),
        ]

    @property
    def counters(self) -> list[Counter]:
        return [self.lines, self.tokens]

    def on_batches(self, statuses: Iterable[str]) -> None:
        """Record the statuses of the batches that are not over."""
        self._num_by_status = Counts(statuses)

    def on_open_lines(self, count: int) -> None:
        """Record how many requests run."""
        self._num_open_lines = count

    def on_line(self, is_answered: bool, num_input: int, num_output: int) -> None:
        """Count a line that has ended, with its tokens."""
        self.lines.add(1, "completed" if is_answered else "failed")
        self.tokens.add(num_input, "input")
        self.tokens.add(num_output, "output")

    def _open_batches(self) -> Readings:
        return [({"status": status}, self._num_by_status[status]) for status in OPEN]

    def _open_lines(self) -> float:
        return self._num_open_lines
