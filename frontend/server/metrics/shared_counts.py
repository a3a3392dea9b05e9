"""SharedCounts: the counts of each frontend of an engine in a file, so that each frontend can show the sums of all.

A frontend writes its file at most once a second, and only if something has changed. The totals of a lost frontend stay
as in its file, without its last second, and its successor continues them. Momentary values, such as the number of open
requests, count only while their frontend runs. An engine with one frontend has no file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.process.log import is_worth_a_line
from ....ipc.spec.config.engine_spec import EngineSpec
from .registry import MetricState

logger = logging.getLogger("tokenloom.frontend")

WRITE_INTERVAL_S = 1.0
MAX_SHOWN = 100  # most open answers in a file
NEVER = float("inf")  # monotonic time of an event that never comes


class FrontendCounts(msgspec.Struct, frozen=True):
    """Content of the file of one frontend."""

    identity: str  # of the process that wrote the file
    totals: dict[str, MetricState] = {}  # by metric name, since the engine's start
    gauges: dict[str, MetricState] = {}
    num_open_requests: int = 0
    open_answers: list[JsonObject] = []  # as the dashboard shows them, oldest first


class SharedCounts:
    """This frontend's file, and a view of the other frontends' files. `own` collects the content to write; `next_at`:
    the time of the next write in `tick`, in monotonic seconds."""

    def __init__(
        self,
        spec: EngineSpec,
        index: int,
        own: Callable[[], FrontendCounts],
        is_running: Callable[[str], bool],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`index`: the number of this frontend. `is_running(identity)`: whether the frontend with this identity
        runs."""
        paths = [_path(spec.run_directory, each) for each in range(spec.config.api_server_count)]
        self._path, self._paths = paths[index], [path for path in paths if path != paths[index]]
        self._own, self._is_running, self._monotonic = own, is_running, monotonic
        self._written, self._written_at, self._num_unwritten = b"", -WRITE_INTERVAL_S, 0
        self._cached: dict[Path, tuple[tuple[int, int], FrontendCounts]] = {}  # with its inode and time of change
        self.next_at = NEVER

    def predecessor(self) -> FrontendCounts | None:
        """Return the counts that this frontend's predecessor left; None if this is the first, or the engine has one
        frontend."""
        return _read(self._path) if self._paths else None

    @property
    def others(self) -> list[FrontendCounts]:
        """The counts of the other frontends; without gauges and open requests for frontends that do not run."""
        found = [counts for path in self._paths if (counts := self._read_cached(path)) is not None]
        gone = {"gauges": {}, "num_open_requests": 0, "open_answers": []}
        return [
            counts if self._is_running(counts.identity) else msgspec.structs.replace(counts, **gone) for counts in found
        ]

    def states(self) -> Sequence[Mapping[str, MetricState]]:
        """Return the states of the other frontends' metrics, one dict by metric name for each frontend."""
        return [{**counts.totals, **counts.gauges} for counts in self.others] if self._paths else ()

    def tick(self, now: float) -> None:
        """If a write is due, write the file unless its content is unchanged; otherwise schedule the write by `next_at`.
        To be called in each turn."""
        if not self._paths:
            return
        due = self._written_at + WRITE_INTERVAL_S
        if now < due:
            self.next_at = due
            return
        self.next_at, self._written_at = NEVER, now
        content = msgspec.msgpack.encode(self._own())
        if content != self._written:
            self._write(content)

    def _write(self, content: bytes) -> None:
        aside = self._path.with_suffix(".new")
        try:
            aside.write_bytes(content)
            os.replace(aside, self._path)
        except OSError as error:
            self._num_unwritten += 1
            if is_worth_a_line(self._num_unwritten):
                text = "%s cannot be written (%s): the sums over frontends are too low"
                logger.warning(text, self._path, error.strerror)
            return
        self._written = content

    def _read_cached(self, path: Path) -> FrontendCounts | None:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            identity, known = (status.st_ino, status.st_mtime_ns), self._cached.get(path)
            if known is not None and known[0] == identity:
                return known[1]
            if (counts := _read(path)) is not None:
                self._cached[path] = identity, counts
            return counts
        return None


def _path(run_directory: str, index: int) -> Path:
    return Path(run_directory) / f"frontend-{index}.counts"


def _read(path: Path) -> FrontendCounts | None:
    with contextlib.suppress(FileNotFoundError):
        return msgspec.msgpack.decode(path.read_bytes(), type=FrontendCounts)
    return None
