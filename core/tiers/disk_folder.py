"""DiskFolder: the folder of a disk source, which belongs to tokenloom alone.

The source removes files to keep the folder's limit, so nothing else may be kept in the folder. A marker file shows that
a folder is ours. The marker is written into a new or empty folder, and into one that holds our lock file and only names
that we use. `lost+found` and the folders of other replicas do not count. Any other folder is refused, and nothing in it
is touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from pathlib import Path

from ...ipc.errors import ConfigError
from ...ipc.spec.config.private_folder import open_private
from .disk_scan import NAMESPACE_NAME, OBJECT_NAME

MARKER = "CACHEDIR.TAG"  # by which backup programs recognize a cache (bford.info/cachedir)
MARK = b"Signature: 8a477f597d28d172789f06886806bc55\n# A folder of tokenloom's --kv-disk\n"
_EXPLANATION = b"# tokenloom removes files here to hold --kv-disk-bytes. Keep other files elsewhere.\n"
UNFINISHED = "tmp"
_LOCK = ".lock"
_NOT_COUNTED = re.compile(r"lost\+found|replica-\d+")  # of the file system, and of other replicas of this engine
_NO_WRITES = (errno.EROFS, errno.EACCES, errno.EPERM)


class DiskFolder:
    """Open and locked folder. `path` leads to it even if another folder gets its name later."""

    def __init__(self, path: Path) -> None:
        """Open and lock the folder, which is created if it is missing. ConfigError if it is not ours, is a link, or can
        be written by other users; OSError if it cannot be opened or locked."""
        self._fd = open_private(path)
        self._lock_fd = -1
        self.path = f"/proc/self/fd/{self._fd}"
        self.unfinished = f"{self.path}/{UNFINISHED}"
        try:
            self._mark(path)
            self._lock_fd = self._lock()
        except BaseException:
            self.close()
            raise

    def _mark(self, path: Path) -> None:
        """Check the marker, or write it into a folder that may become ours. ConfigError if the folder is not ours."""
        try:
            fd = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except FileNotFoundError:
            found = sorted(name for name in os.listdir(self._fd) if not _NOT_COUNTED.fullmatch(name))
        else:
            with open(fd, "rb", buffering=0) as file:
                found = [] if file.read(len(MARK)) == MARK else [MARKER]
            if not found:
                return
        ours = (_LOCK, UNFINISHED)
        others = [name for name in found if not (name in ours or NAMESPACE_NAME.fullmatch(name))]
        if others or (found and _LOCK not in found):
            first = (others or found)[0]
            raise ConfigError(
                f"{path} holds other things ({first!r:.100}): give a folder that is new or empty, {path / 'kv-blocks'}"
            )
        with contextlib.suppress(FileExistsError):
            self._write_marker()

    def _write_marker(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(MARKER, flags, 0o600, dir_fd=self._fd)
        except OSError as error:
            if error.errno not in _NO_WRITES:  # otherwise nothing can be removed either
                raise
            return
        with open(fd, "wb", buffering=0) as file:
            try:
                file.write(MARK + _EXPLANATION)
            except OSError:  # with half a marker the folder would not count as ours
                os.unlink(MARKER, dir_fd=self._fd)
                raise

    def _lock(self) -> int:
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(_LOCK, os.O_RDWR | os.O_CREAT | flags, 0o600, dir_fd=self._fd)
        except OSError as error:
            if error.errno not in _NO_WRITES:
                raise
            fd = os.open(_LOCK, os.O_RDONLY | flags, dir_fd=self._fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise OSError(errno.EBUSY, error.strerror) from None
        except OSError:
            os.close(fd)
            raise
        return fd

    def remove_unfinished(self) -> None:
        """Remove the unfinished files of dead writers from their folder, which is created if it is missing. Files with
        other names are left. OSError if something other than a folder is there."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.unfinished, 0o700)
        os.close(os.open(self.unfinished, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
        with os.scandir(self.unfinished) as entries:
            for entry in entries:
                if OBJECT_NAME.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)

    def close(self) -> None:
        """Release the lock and close the folder. `path` must not be used afterwards: the number of its descriptor may
        be given to another file."""
        for fd in (self._lock_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._fd = -1
