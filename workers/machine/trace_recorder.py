"""TraceRecorder: torch's profiler on one rank, written as a Chrome trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import errno
import logging
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

logger = logging.getLogger("tokenloom.worker")


class TraceRecorder:
    """Recorder of at most one profile at a time, which is in memory until it is written. It records only the thread
    that starts it."""

    def __init__(self, folder: Path, name: str, device: torch.device) -> None:
        self._folder, self._name = folder, name
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = None

    def switch(self, records: bool) -> str:
        """Start a recording (`records` true), or end it and write its file. Return an error message, "" for none."""
        try:
            self._begin() if records else self._write()
        except Exception as error:
            logger.exception("the profile failed")
            return f"{type(error).__name__}: {error}"
        return ""

    def step(self, number: int) -> AbstractContextManager[object]:
        """Return a context that shows a step in the trace as a range `step NUMBER`; torch cannot show kernels that are
        not its own."""
        return nullcontext() if self._profile is None else record_function(f"step {number}")

    def drop(self) -> None:
        """End a recording, if there is one, without writing it, because the core that started it is gone."""
        if self._profile is not None:
            record, self._profile = self._profile, None
            record.stop()
            logger.warning("the profile ends unwritten: its core was replaced")

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)  # a bad folder must fail now, not after the recording
        record = profile(activities=self._activities)
        record.start()
        self._profile = record
        logger.info("profile begun, for a trace in %s", self._folder)

    def _write(self) -> None:
        record, self._profile = self._profile, None
        assert record is not None, "the core ends only records that it began"
        record.stop()
        now = time.time()
        stamp = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{int(now * 1000) % 1000:03d}"
        path = self._folder / f"{self._name}.{stamp}.pt.trace.json"
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            record.export_chrome_trace(str(unfinished))
            if not _is_whole(unfinished):  # torch does not say so
                raise OSError(errno.ENOSPC, f"{self._folder} has no room for the profile: make some, and repeat it")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        logger.info("profile written to %s, %.1f MB", path, path.stat().st_size / 1e6)


def _is_whole(path: Path) -> bool:
    """Return whether the file of a trace is complete: whether it ends with the closing brace of its JSON."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 16, 0))
        return file.read().rstrip().endswith(b"}")
