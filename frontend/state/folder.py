"""StateFolder: the folder of --state-dir, which one engine at a time uses.

    lock            a flock, held by the supervisor and its frontends; its text names the supervisor
    state.sqlite    the tables of `schema.py`, with SQLite's log and index beside it
    files/          the contents of files, by id

The folder must be on a local disk. A new one, and all that the engine makes in it, belongs to its user alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

from ...ipc.errors import ConfigError
from ...ipc.spec.config.private_folder import make_folder
from .schema import FILE, VERSION

LOCK = "lock"
FILES = "files"
WAIT_S = 5.0  # for the frontends of an engine that was killed: they end when they notice
_POLL_S = 0.05
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class StateFolder:
    """Owner of the lock, from `open` to `close`.

    Frontends inherit the lock's descriptor (`fds`), so that the next engine waits until the last one of this has
    ended, even if its supervisor was killed."""

    def __init__(self) -> None:
        self.fds: Sequence[int] = ()

    def open(self, path: str | None) -> None:
        """Make all that is missing, take the lock and check the database; do nothing without a path. ConfigError, with
        nothing deleted, if the folder is in use, damaged, written by a newer version, or cannot be used."""
        if path is None:
            return
        try:
            self._open(Path(path))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ConfigError(f"--state-dir {path} cannot be used: {error.strerror}") from None
            if isinstance(error, sqlite3.Error):
                raise _fault(Path(path) / FILE, error) from None
            raise

    def _open(self, path: Path) -> None:
        make_folder(path)
        self.fds = [_locked(path)]
        make_folder(path / FILES)
        os.close(os.open(path / FILE, _FLAGS, 0o600))
        _check_database(path / FILE)
        _sync(path)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = ()


def _locked(folder: Path) -> int:
    """Take the lock and return its descriptor; ConfigError if another engine still holds it after WAIT_S."""
    fd = os.open(folder / LOCK, _FLAGS, 0o600)
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "an engine"
                os.close(fd)
                raise ConfigError(
                    f"--state-dir {folder} is in use by {holder}: stop that engine, or give another folder"
                ) from None
            time.sleep(_POLL_S)
    os.ftruncate(fd, 0)
    with contextlib.suppress(OSError):  # a full disk: the engine serves without it
        os.pwrite(fd, f"the engine of process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    return fd


def _check_database(path: Path) -> None:
    """Raise ConfigError if the tables are newer than ours or pages are damaged; sqlite3.Error if it cannot be read."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise ConfigError(
                f"{path} was written by a newer version, with tables {version}; this one reads {VERSION}: start the "
                "newer version, or give another --state-dir"
            )
        (fault,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if fault != "ok":
            raise _damage(path, fault)


def _fault(path: Path, error: sqlite3.Error) -> ConfigError:
    if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return _damage(path, str(error))
    return ConfigError(f"{path} cannot be opened: {error}: free space or permit it, or give another --state-dir")


def _damage(path: Path, fault: str) -> ConfigError:
    return ConfigError(f"{path} is damaged ({fault}): restore it from a copy, or give another --state-dir")


def _sync(folder: Path) -> None:
    """Write the folder's entries to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
