"""A checkpoint's pages in the machine's page cache: asked for early, given back when they are not wanted."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def start_readahead(folder: Path) -> threading.Thread:
    """Begin to read the weight files in `folder` into the page cache, while torch is imported: both take seconds.
    Returns at once."""
    thread = threading.Thread(target=_advise, args=(folder, os.POSIX_FADV_WILLNEED), name="readahead", daemon=True)
    thread.start()
    return thread


def drop_pages(folder: Path) -> None:
    """Let the page cache forget the weight files in `folder`, but for what other programs have mapped."""
    _advise(folder, os.POSIX_FADV_DONTNEED)


def _advise(folder: Path, advice: int) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # whoever loads it says so better
            continue
        try:
            os.posix_fadvise(fd, 0, 0, advice)
        finally:
            os.close(fd)
