"""StateClock: measures the ages of stored objects, over restarts of the machine.

While the machine runs, the clock follows the time since its boot, which nobody can set. At the first use after a boot
it begins with the wall time, but never before a time that it has shown at an earlier opening of the database. So a wall
clock that is set, or wrong until the network corrects it, neither ends all objects nor lets them live for ever.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_time() -> float:
    """Return the seconds since the machine booted, including suspensions. Nothing can set this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return a text that differs between boots. Where the kernel has none it is the minute of the boot."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return f"{(time.time() - boot_time()) // 60:.0f}"


class StateClock:
    """Clock that all processes which use one database share. Call `begin` before `now`."""

    def __init__(
        self,
        boot_time: Callable[[], float] = boot_time,
        wall_time: Callable[[], float] = time.time,
        boot_id: Callable[[], str] = boot_id,
    ) -> None:
        self._boot_time, self._wall_time, self._boot_id = boot_time, wall_time, boot_id
        self._offset = 0.0

    def begin(self, database: sqlite3.Connection) -> None:
        """Read this boot's offset, or choose and store it, in the caller's transaction."""
        boot = self._boot_id()
        row = database.execute("SELECT boot, start, seen FROM clock").fetchone()
        if row is not None and row[0] == boot:
            self._offset = row[1]
        else:
            seen = 0.0 if row is None else row[2]
            self._offset = max(self._wall_time(), seen) - self._boot_time()
        database.execute("REPLACE INTO clock VALUES (0, ?, ?, ?)", (boot, self._offset, self.now()))

    def now(self) -> float:
        """Return the seconds since 1970 by this clock. They order and age objects; users are shown the wall time."""
        return self._boot_time() + self._offset
