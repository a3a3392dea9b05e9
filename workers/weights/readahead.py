"""Asks the kernel for a checkpoint's pages while torch is being imported: both take seconds."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def start_readahead(folder: Path) -> threading.Thread:
    """Begin to read the weight files in `folder` into the page cache; returns at once."""
    thread = threading.Thread(target=_advise, args=(folder,), name="readahead", daemon=True)
    thread.start()
    return thread


def _advise(folder: Path) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # whoever loads it says so better
            continue
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)
