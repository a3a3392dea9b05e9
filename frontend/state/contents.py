"""The contents of files on the disk: one that is being written, one that is read, and those of killed writers.

All calls block: they are made in a thread. Knows no tables.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .room import check_room

PART = ".part"  # behind the id of a file that is being written
READ_BYTES = 256 << 10
WAIT_S = 5.0  # for a file that a sweep holds
_POLL_S = 0.01
_NAME = re.compile(r"(file-[0-9a-f]+)(?:\.part)?")  # of the files made here; others are left alone
_CREATE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class PartFile:
    """A file that is being written, beside its place. It is locked until it is closed. Calls of several threads take
    effect one after the other; after `remove` writing has no effect."""

    def __init__(self, folder: Path, file_id: str, spare_bytes: int) -> None:
        """`spare_bytes`: of the disk, which the file leaves free."""
        self.file_id = file_id
        self._spare_bytes = spare_bytes
        self._place = folder / file_id
        self._path = folder / f"{file_id}{PART}"
        self._lock = threading.Lock()
        self._file = os.fdopen(_created(self._path), "r+b", buffering=0)

    def write(self, data: Sequence[bytes]) -> None:
        with self._lock:
            if not self._file.closed:
                check_room(self._file.fileno(), self._spare_bytes + sum(map(len, data)))
            for piece in data:
                rest = memoryview(piece)
                while rest and not self._file.closed:
                    rest = rest[self._file.write(rest) :]

    def put_in_place(self) -> None:
        """Write all to the disk under the file's name."""
        with self._lock:
            os.fsync(self._file.fileno())
            os.rename(self._path, self._place)
            self._path = self._place
            sync_folder(self._place.parent)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def remove(self) -> None:
        """Remove the file, and close it."""
        with self._lock:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._file.close()


class FileReader:
    """A file that is open for reading, even if it is deleted meanwhile."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._file = os.fdopen(os.open(path, _READ), "rb", buffering=0)

    def read(self) -> bytes:
        """Return the next bytes; b"" at the end."""
        with self._lock:
            return self._file.read(READ_BYTES)

    def close(self) -> None:
        with self._lock:  # a thread may still read for a caller that has left
            self._file.close()


class Leftover:
    """A file that no writer holds. It is locked until it is closed, so that none takes it up."""

    def __init__(self, path: Path) -> None:
        """BlockingIOError if a writer holds it."""
        self._path = path
        self._fd = os.open(path, _READ)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise

    def remove(self) -> None:
        os.unlink(self._path)

    def close(self) -> None:
        os.close(self._fd)


class FileName(NamedTuple):
    """Name of a file in the folder. `is_part`: it is being written."""

    name: str
    file_id: str
    is_part: bool


def file_names(folder: Path) -> list[FileName]:
    """Return the names of the folder's files; others are left out."""
    found = [_NAME.fullmatch(name) for name in os.listdir(folder)]
    return [FileName(match[0], match[1], match[0].endswith(PART)) for match in found if match is not None]


def take_leftover(path: Path) -> Leftover | None:
    """Return a file that no writer holds; None if one does, or if it is gone."""
    try:
        return Leftover(path)
    except (BlockingIOError, FileNotFoundError):
        return None


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _created(path: Path) -> int:
    """Create a file, or empty the one of a killed writer, and return its descriptor, locked. OSError (EBUSY) if another
    writer holds it for longer than WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        fd = os.open(path, _CREATE, 0o600)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(fd).st_ino:  # no sweep has removed it
                os.ftruncate(fd, 0)
                return fd
        os.close(fd)
        time.sleep(_POLL_S)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
