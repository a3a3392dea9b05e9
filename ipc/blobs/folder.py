"""A folder of blob files that several processes share, limited in bytes.

The processes share `flock`s, which the kernel releases when their holder dies. A pin, a mapping and an unfinished write
each hold a shared lock on their file; a file without a lock may be removed. Files are created, renamed and evicted
under the folder's lock, on the file `lock`. A file's access time is the time of its last use. Digests are not checked
here. The file `lock` contains the total size of all files, or more: the total grows before a file does, and a process
that dies may leave it too large. The files are listed, and the total corrected, only when it reaches the limit and at a
process's first write.
Layout, on a local disk: <folder>/{lock,<64 hex>,<16 hex>.part}; folder mode 0700, files 0600.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError, Overloaded, RequestError
from ..process.awake_clock import order_of_use
from ..shortages.failure import shortage_of

MANY_FILES = 256  # with more, an eviction also frees 1 / SPARE of the limit, so that few writes list the files
SPARE = 16

_NAME = re.compile(r"[0-9a-f]{64}|[0-9a-f]{16}\.part")  # blobs and unfinished files; others are ignored


class BlobFile(NamedTuple):
    """A file of the folder; the first one in sorted order is removed first."""

    is_blob: bool  # False: an unfinished file
    used_ns: int  # order of last use, from `order_of_use`
    name: str
    size: int


class BlobFolder:
    """Blobs and unfinished files. Their total size, unfinished files at their reserved size, is at most `max_bytes`."""

    def __init__(self, path: Path, max_bytes: int, now_ns: Callable[[], int] = time.time_ns) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.num_evicted = 0
        self._now_ns = now_ns
        self._has_counted = False

    def files(self) -> list[BlobFile]:
        """Return all blobs and unfinished files."""
        found, now = [], self._now_ns()
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if _NAME.fullmatch(entry.name):
                        is_blob, status = not entry.name.endswith(".part"), entry.stat(follow_symlinks=False)
                        used_ns = order_of_use(status.st_atime_ns, now)
                        found.append(BlobFile(is_blob, used_ns, entry.name, status.st_size))
        return found

    def acquire(self, name: str) -> int | None:
        """Open a file for reading with a shared lock, and record the use; return the descriptor, None if the file is
        missing. ConfigError if it is a symbolic link.

        The lock lasts until the last duplicate of the descriptor is closed; a mapping (mmap) keeps a duplicate open.
        """
        while _NAME.fullmatch(name):  # a peer may request any name
            try:
                fd = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOATIME | os.O_NOFOLLOW)
            except FileNotFoundError:
                break
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                raise ConfigError(f"{self.path / name} is a link, which is never followed: remove it") from None
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)  # waits while an eviction decides: microseconds
                if os.fstat(fd).st_nlink:
                    self._touch(fd)
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # evicted between open and flock
        return None

    def create_part(self) -> tuple[Path, int]:
        """Create an empty unfinished file with a shared lock; return its path and descriptor."""
        path = self.path / f"{secrets.token_hex(8)}.part"
        with self.locked():
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
            except BaseException:
                os.close(fd)
                raise
        return path, fd

    def resize(self, fd: int, old_size: int, new_size: int) -> None:
        """Change the reserved size of an unfinished file, and evict blobs if the limit requires it. RequestError if the
        file alone exceeds the limit, Overloaded if the files in use leave too little room or the disk is full."""
        if new_size > self.max_bytes:
            raise RequestError(
                f"a blob of {new_size} bytes exceeds the limit of {self.path}, {self.max_bytes} bytes: "
                "use a smaller one or raise the limit"
            )
        with self.locked() as lock:
            if new_size > old_size:
                self._make_room(lock, new_size - old_size)
            os.ftruncate(fd, new_size)
            if new_size < old_size and (total := _read_total(lock)) >= 0:
                _write_total(lock, total - (old_size - new_size))

    def publish(self, part: Path, fd: int, name: str) -> bool:
        """Rename an unfinished file to `name` and return True; False if `name` exists already: others may have pinned
        it."""
        with self.locked():
            if (self.path / name).exists():
                return False
            self._touch(fd)
            part.rename(self.path / name)
            return True

    def remove(self, name: str, fd: int) -> bool:
        """Remove a file, even a protected one, if it is the one that `fd` has open; return whether it was removed."""
        path = self.path / name
        with self.locked(), contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(fd)):
                path.unlink()
                return True
        return False

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the folder's lock, and yield the descriptor of the lock file; create the folder if it is missing.
        ConfigError if it belongs to another user or is open to others, Overloaded if the system is short of something.
        """
        with self.shortage_is_overload():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.path.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise ConfigError(f"{self.path} must belong to this user with mode 0700: chmod 700 it or use another")
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                yield fd
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def shortage_is_overload(self) -> Iterator[None]:
        """Raise Overloaded in place of an OSError for a full disk or another shortage."""
        try:
            yield
        except OSError as error:
            raise shortage_of(error, f"cannot write to {self.path}") or error from None

    def _touch(self, fd: int) -> None:
        """Set the last use of a file to now, and keep its mtime, which is part of its identity."""
        os.utime(fd, ns=(self._now_ns(), os.fstat(fd).st_mtime_ns))

    def _make_room(self, lock: int, num_bytes: int) -> None:
        """Add `num_bytes` to the total. If it exceeds the limit, remove unfinished files of dead processes, then the
        least recently used blobs until it fits. Evict no blob and raise Overloaded if locked files leave too little
        room."""
        if self._has_counted and 0 <= (total := _read_total(lock)) <= self.max_bytes - num_bytes:
            _write_total(lock, total + num_bytes)
            return
        files = sorted(self.files())
        total = sum(file.size for file in files) + num_bytes
        is_full = self._has_counted or total > self.max_bytes
        spare = self.max_bytes // SPARE if is_full and len(files) > MANY_FILES else 0
        chosen = []
        for file in files:
            if total + spare <= self.max_bytes and file.is_blob:
                break
            if self._evict(file, is_trial=file.is_blob):
                total -= file.size
                chosen.append(file)
        if total > self.max_bytes:
            free = num_bytes - (total - self.max_bytes)
            raise Overloaded(
                f"no room for {num_bytes} bytes in {self.path}: {free} of {self.max_bytes} bytes are free or can be "
                "evicted, the others are in use: retry later or raise the limit"
            )
        if kept := [file.size for file in chosen if file.is_blob and not self._evict(file)]:
            total += sum(kept)  # a process has begun to use them
        self._has_counted = True
        if total > self.max_bytes:
            _write_total(lock, total - num_bytes)
            self._make_room(lock, num_bytes)
        else:
            _write_total(lock, total)

    def _evict(self, file: BlobFile, is_trial: bool = False) -> bool:
        """Remove a file if no process holds a lock on it; return whether it is gone. A trial removes nothing and
        returns whether the file could be removed."""
        path = self.path / file.name
        with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if not is_trial:
                path.unlink()  # FileNotFoundError: its writer has just done so
                self.num_evicted += file.is_blob
        return True


def _read_total(lock: int) -> int:
    """Return the total size of all files from the lock file; -1 if that is new."""
    found = os.pread(lock, 8, 0)
    return int.from_bytes(found, "little") if len(found) == 8 else -1


def _write_total(lock: int, num_bytes: int) -> None:
    os.pwrite(lock, max(num_bytes, 0).to_bytes(8, "little"), 0)
