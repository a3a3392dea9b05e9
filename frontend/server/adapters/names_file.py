"""NamesFile: the names of an engine's adapters, in a file of the run directory that all its frontends read and change.

A change is made under a lock and replaces the file before the reply to it is sent. Each frontend checks for a new file
before each use of a name, which costs one call of stat: so a name that one frontend has given is known to all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ....ipc.messages.adapter import AdapterInfo
from ....ipc.shortages.failure import failure_of

FILE_NAME = "adapters.json"


class Names(msgspec.Struct, omit_defaults=True):
    """The content of the file."""

    adapters: list[AdapterInfo] = []  # one for each name
    found: list[str] = []  # names of adapters from --adapter-folder; may be dropped, since it still has them
    orders: list[str] = []  # order ids of LoadAdapter and UnloadAdapter that were carried out
    has_modules: bool = False  # whether the adapters of --lora-modules were loaded


class NamesFile:
    """One process's access to the file. Only one thread at a time may call it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd, self._depth = -1, 0
        self._read_fd = -1  # the file that was read or written last; open, so that its inode is not used again

    def read_new(self) -> Names | None:
        """Return the content at the first call, and if another process has replaced the file since it was last read or
        written; else None, also if there is no file."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        if self._read_fd >= 0 and os.path.samestat(status, os.fstat(self._read_fd)):
            return None
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        with open(fd, "rb", closefd=False) as file:
            content = file.read()
        self._forget()
        self._read_fd = fd
        return msgspec.json.decode(content, type=Names)

    def _forget(self) -> None:
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock under which the file is replaced, as a context. Contexts may be nested."""
        if self._lock_fd < 0:
            self._lock_fd = _open_lock(self.path.with_suffix(".lock"))
        if self._depth == 0:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def write(self, names: Names) -> None:
        """Replace the file; the caller holds the lock. Overloaded if the disk is full or another resource is short,
        else InternalError if it cannot be written."""
        replace(self.path, msgspec.json.encode(names))
        self._forget()
        self._read_fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Hold a second lock, as a context, so that one frontend at a time loads the adapters of --lora-modules."""
        fd = _open_lock(self.path.with_suffix(".start"))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def close(self) -> None:
        self._forget()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def replace(path: Path, content: bytes) -> None:
    """Replace a file of the run directory atomically. Overloaded if the disk is full or another resource is short, else
    InternalError if it cannot be written."""
    aside = path.with_suffix(".new")
    try:
        aside.write_bytes(content)
        os.replace(aside, path)
    except OSError as error:
        raise failure_of(error, f"{path} cannot be written") from None


def read_names(path: Path) -> Names:
    """Return the content of the file at `path`; an empty Names if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return msgspec.json.decode(path.read_bytes(), type=Names)
    return Names()


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
