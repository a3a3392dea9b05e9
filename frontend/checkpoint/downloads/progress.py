"""HubProgress: shows a download as log lines if standard error is not a terminal."""

from __future__ import annotations

import io
import sys
import time
from typing import Any

from tqdm.auto import tqdm

from ....ipc.process.log import info_line
from ..start_report import MIN_INTERVAL_S, ThrottledWriter, write_to_stderr


class HubProgress(tqdm):  # type: ignore[misc]  # tqdm has no types
    """Progress bar, in the form of huggingface_hub's `tqdm_class`, that writes at most one log line per MIN_INTERVAL_S
    to stderr."""

    monitor_interval = 0  # no thread of its own
    monotonic = staticmethod(time.monotonic)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._report = ThrottledWriter(write_to_stderr, self.monotonic)
        more = {"disable": False, "ascii": True, "mininterval": MIN_INTERVAL_S / 2, "file": io.StringIO()}  # not stderr
        super().__init__(*arguments, **{**options, **more})

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        self._report(info_line("supervisor", msg or str(self)))


class NoProgress(tqdm):  # type: ignore[misc]
    """Progress bar that shows nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "disable": True})


def bytes_bar(name: str, num_bytes: int) -> tqdm:
    """Return a bar for the bytes of a download: on a terminal one that is redrawn, else one that writes lines."""
    kind = tqdm if sys.stderr.isatty() else HubProgress
    return kind(desc=name, total=num_bytes, unit="B", unit_scale=True, unit_divisor=1024)
