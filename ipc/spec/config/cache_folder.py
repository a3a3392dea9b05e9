"""The user's cache folder, and those in it that hold files which the engine trusts."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .private_folder import make_folder


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/tokenloom, or ~/.cache/tokenloom if that variable is no absolute path. RuntimeError for a
    user without a home."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache") / "tokenloom"


def private_cache(name: str = "") -> Path:
    """Return a folder in the user's cache, or the cache itself, which is made if it is missing. Others could give the
    engine files of theirs: so their rights to write are taken away. PermissionError if it is another user's, unless
    this one is root; RuntimeError or OSError if there is no place for it."""
    cache = cache_folder()
    make_folder(cache / name)
    for folder in {cache, cache / name}:
        status = folder.stat()
        if os.getuid() != 0 and status.st_uid not in (0, os.getuid()):
            raise PermissionError(errno.EPERM, f"it belongs to the user with number {status.st_uid}", str(folder))
        if status.st_mode & 0o022:
            folder.chmod(status.st_mode & 0o755)
    return cache / name
