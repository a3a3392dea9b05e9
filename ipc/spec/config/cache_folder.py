"""The user's cache folder, private folders in it for files that the engine trusts, and the cache of Triton."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from .private_folder import make_folder

logger = logging.getLogger("tokenloom.supervisor")


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


def triton_environment(run_directory: str) -> dict[str, str]:
    """Return the variable that has Triton keep compiled kernels in the run directory, if its own folder, ~/.triton,
    cannot be written: without a folder it compiles none. {} if it can, or TRITON_CACHE_DIR names one."""
    if os.environ.get("TRITON_CACHE_DIR"):
        return {}
    try:
        folder = Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton")
        make_folder(folder)
        if os.access(folder, os.W_OK):
            return {}
        why = f"{folder} cannot be written"
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        why = str(error)
    logger.warning("each start compiles the GPU's kernels again (%s): set TRITON_CACHE_DIR to a folder", why)
    return {"TRITON_CACHE_DIR": str(Path(run_directory, "triton"))}
