"""Folders that this user alone can write.

Another user with write access to a folder can put links and files of theirs where the engine expects its own. So a
folder is checked when it is opened; accesses through its descriptor do not depend on its name afterwards.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ...errors import ConfigError


def make_folder(path: Path) -> None:
    """Create a folder, and missing folders above it, with mode 0700; do nothing if it exists."""
    if not path.is_dir():
        if path.parent != path:
            make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)


def open_private(path: Path) -> int:
    """Open a folder, created if it is missing, and return its descriptor. ConfigError if it is a link, belongs to
    another user than this one or root, or can be written by others; OSError if it cannot be opened."""
    if path.is_symlink():
        raise ConfigError(f"{path} is a link to {path.resolve()}: give that folder itself")
    make_folder(path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if fault := write_fault(os.fstat(fd)):
            raise ConfigError(f"{path} {fault}")
        return fd
    except BaseException:
        os.close(fd)
        raise


def write_fault(status: os.stat_result) -> str:
    """Return why others can write to a file or folder, with the remedy; "" if only this user and root can."""
    if status.st_uid not in (0, os.getuid()):
        return f"belongs to the user with number {status.st_uid}: give a new one"
    if status.st_mode & 0o022:
        return f"can be written by others (mode {status.st_mode & 0o7777:o}): chmod go-w it, or give a new one"
    return ""
