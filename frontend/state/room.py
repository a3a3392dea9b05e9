"""Room on the disk of the state. What is added leaves some free, so that on a full disk files and rows can be deleted:
SQLite writes to its log first."""

from __future__ import annotations

import errno
import os
from pathlib import Path

ROW_SPARE_BYTES = 6 << 20  # that new rows leave free: to empty its log of 4 MiB, SQLite writes it to the tables first
UPLOAD_SPARE_BYTES = 12 << 20  # that uploads leave free, to rows and to the outputs of batches


def free_bytes(place: Path | int) -> int:
    """Return the bytes that may be written to the disk of this path or descriptor. OSError if it cannot be asked."""
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def check_room(place: Path | int, num_bytes: int) -> None:
    """Raise OSError (ENOSPC) if the disk of this path or descriptor has less free space."""
    if free_bytes(place) < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
