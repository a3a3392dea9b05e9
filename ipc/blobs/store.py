"""BlobStore: blobs by their SHA-256, in a folder that the processes of an engine share.

A reader never gets an incomplete or a damaged blob. A blob is kept while a living process pins or maps it; the others
are evicted when room is needed, least recently used first. Hashing takes about 0.6 s per GB, so large blobs are put,
and opened for the first time, in a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from .folder import BlobFolder
from .writer import BlobWriter

READ_BYTES = 1 << 20
MAX_CHECKED = 1 << 12
Identity: TypeAlias = tuple[int, int, int, int]  # device, inode, size, mtime_ns


class _Pin(NamedTuple):
    fd: int  # with a shared lock
    users: set[str]


class BlobStore:
    """One process's access to the folder. It owns this process's pins, and remembers which files it has checked.
    Thread-safe."""

    def __init__(self, folder: Path, max_bytes: int, now_ns: Callable[[], int] = time.time_ns) -> None:
        self.folder = BlobFolder(folder, max_bytes, now_ns)
        self.num_corrupt = 0
        self._lock = threading.Lock()  # of both tables
        self._checked: dict[bytes, Identity] = {}  # by digest
        self._pins: dict[bytes, _Pin] = {}  # by digest

    def put(self, source: bytes | memoryview | Path | Iterable[bytes], user: str = "") -> bytes:
        """Add a blob from bytes, a file or chunks, pinned for `user` if one is given; return its digest. RequestError
        if it exceeds the folder's limit, Overloaded if there is no room now."""
        if isinstance(source, bytes | memoryview):
            digest = hashlib.sha256(source).digest()
            if self._has(digest, user):
                return digest
            size, chunks = len(source), iter([source])
        elif isinstance(source, Path):
            size, chunks = source.stat().st_size, _read(source)
        else:
            size, chunks = 0, iter(source)
        with contextlib.closing(BlobWriter(self.folder, size)) as writer:
            for chunk in chunks:
                writer.write(chunk)
            self.add(writer, user)
            return writer.digest()

    def add(self, writer: BlobWriter, user: str = "") -> None:
        """Publish a writer's blob, unless the store has it already, and close the writer. Pin the blob for `user`, if
        one is given."""
        with contextlib.closing(writer):
            while not self._has(writer.digest(), user):
                if writer.publish():
                    self._note_checked(writer.digest(), writer.fd)

    def open(self, digest: bytes) -> memoryview | None:
        """Map a blob for reading and return the mapping, which keeps the blob from being evicted; None if the blob is
        missing or damaged."""
        fd = self._acquire(digest)
        if fd is None:
            return None
        try:
            size = os.fstat(fd).st_size
            return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ) if size else b"")
        finally:
            os.close(fd)

    def pin(self, digest: bytes, user: str) -> bool:
        """Keep a blob until `unpin` is called for the same user, or this process ends. Return False if it is missing.

        Costs one descriptor for each pinned blob. Does not check the content.
        """
        with self._lock:
            pin = self._pins.get(digest)
            if pin is None or not os.fstat(pin.fd).st_nlink:  # a damaged blob was removed
                fd = self.folder.acquire(digest.hex())
                if fd is None:
                    return False
                if pin is not None:
                    os.close(pin.fd)
                pin = self._pins[digest] = _Pin(fd, set() if pin is None else pin.users)
            pin.users.add(user)
            return True

    def unpin(self, digest: bytes, user: str) -> None:
        """Remove a user's pin, if there is one."""
        with self._lock:
            pin = self._pins.get(digest)
            if pin is not None:
                pin.users.discard(user)
                if not pin.users:
                    os.close(self._pins.pop(digest).fd)

    def num_bytes(self) -> int:
        """Return the total size of the folder's files, unfinished ones at their reserved size; exact only while the
        folder is locked."""
        return sum(file.size for file in self.folder.files())

    def _has(self, digest: bytes, user: str) -> bool:
        """Return whether the store has this blob, undamaged; pin it for `user`, if one is given."""
        fd = self._acquire(digest)
        if fd is None:
            return False
        try:
            return not user or self.pin(digest, user)
        finally:
            os.close(fd)

    def _acquire(self, digest: bytes) -> int | None:
        """Open a blob with a shared lock and return the descriptor; None if it is missing or damaged. The content is
        checked once per identity of the file; a damaged file is removed."""
        fd = self.folder.acquire(digest.hex())
        if fd is None or self._checked.get(digest) == _identity(fd):
            return fd
        with contextlib.suppress(OSError), open(fd, "rb", buffering=0, closefd=False) as file:
            if hashlib.file_digest(file, "sha256").digest() == digest:
                self._note_checked(digest, fd)
                return fd
        try:
            self.num_corrupt += self.folder.remove(digest.hex(), fd)
        finally:
            os.close(fd)
        return None

    def _note_checked(self, digest: bytes, fd: int) -> None:
        with self._lock:
            self._checked[digest] = _identity(fd)
            if len(self._checked) > MAX_CHECKED:
                del self._checked[next(iter(self._checked))]


def _identity(fd: int) -> Identity:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(READ_BYTES):
            yield chunk
