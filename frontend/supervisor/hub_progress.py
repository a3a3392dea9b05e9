"""HubProgress: a download's bar as lines of the log, for a standard error that is no terminal."""

from __future__ import annotations

import io
from typing import Any

from tqdm.auto import tqdm

from ...ipc.process.log import info_line
from .start_report import PATIENCE_S, PatientReport, write_to_stderr


class HubProgress(tqdm):  # type: ignore[misc]  # tqdm has no types
    """What huggingface_hub takes as `tqdm_class`."""

    monitor_interval = 0  # no thread of its own

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._report = PatientReport(write_to_stderr)
        more = {"disable": False, "ascii": True, "mininterval": PATIENCE_S / 2, "file": io.StringIO()}  # its own writes
        super().__init__(*arguments, **{**options, **more})

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        self._report(info_line("supervisor", msg or str(self)))
