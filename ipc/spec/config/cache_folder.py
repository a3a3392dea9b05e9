"""The user's cache folder, and private folders in it for files that the engine trusts."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .private_folder import make_folder


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/tokenloom, or ~/.cache/tokenloom if that variable is not an absolute path. RuntimeError if
    the user has no home."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache") / "tokenloom"


def private_cache(name: str = "") -> Path:
    """Return the folder `name` in the cache folder ("": the cache folder itself); create it if it is missing. Take
    write permission from other users, who could put files of theirs there. PermissionError if a folder belongs to
    another user than this one or root, unless this user is root; RuntimeError or OSError if a folder cannot be
    created."""
    cache = cache_folder()
    make_folder(cache / name)
    for folder in {cache, cache / name}:
        status = folder.stat()
        if os.getuid() != 0 and status.st_uid not in (0, os.getuid()):
            raise PermissionError(errno.EPERM, f"it belongs to the user with number {status.st_uid}", str(folder))
        if status.st_mode & 0o022:
            folder.chmod(status.st_mode & 0o755)
    return cache / name
