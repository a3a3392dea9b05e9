"""EngineRecord: the file in an engine's run directory by which commands of the same user find the engine.

The supervisor writes the file when the engine serves; it is removed with the directory. If the lock of a directory is
free, its engine has ended and the file does not count.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec

from ...ipc.sockets.addresses import live_directories

logger = logging.getLogger("tokenloom.supervisor")

FILE = "engine.json"


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a serving engine: its model and its addresses."""

    pid: int  # of its supervisor
    model: str  # the name that requests use
    addresses: list[str]  # for Client, one of each frontend
    started_at: float  # unix seconds
    given_model: str | None = None  # as the operator wrote it; None: the demo
    http_address: str | None = None  # http[s]://HOST:PORT, or unix:PATH
    key_file: str | None = None  # of the addresses
    is_private: bool = False  # it belongs to a program, and ends with it

    def write(self, run_directory: Path) -> None:
        """Write the file as a whole. If the disk has no room, log it: the engine serves all the same."""
        new = run_directory / f"{FILE}.new"
        try:
            new.write_bytes(msgspec.json.encode(self))
            os.replace(new, run_directory / FILE)
        except OSError as error:
            logger.warning("commands will not find this engine without its address: %s", error)


def running_engines() -> list[EngineRecord]:
    """Return the records of this user's serving engines, in the order of their starts."""
    found: list[EngineRecord] = []
    for directory in live_directories():
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # it is still starting, or has just ended
            found.append(msgspec.json.decode((directory / FILE).read_bytes(), type=EngineRecord))
    return sorted(found, key=lambda each: each.started_at)
