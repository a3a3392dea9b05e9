"""Read-ahead of a checkpoint's files into the page cache, and the release of their pages."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from ...ipc.spec.config.weight_files import weight_paths


def start_readahead(folder: Path) -> threading.Thread:
    """Start a thread that reads the weight files in `folder` into the page cache, while torch is imported; return
    it."""
    thread = threading.Thread(target=_advise, args=(folder, os.POSIX_FADV_WILLNEED), name="readahead", daemon=True)
    thread.start()
    return thread


def drop_pages(folder: Path) -> None:
    """Drop the weight files in `folder` from the page cache, except pages that a process has mapped."""
    _advise(folder, os.POSIX_FADV_DONTNEED)


def _advise(folder: Path, advice: int) -> None:
    for path in weight_paths(folder):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # loading the file reports it better
            continue
        try:
            os.posix_fadvise(fd, 0, 0, advice)
        finally:
            os.close(fd)
