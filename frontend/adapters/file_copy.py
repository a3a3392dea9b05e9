"""Copies of files that are read once: each piece is checked, hashed and written before the next is read."""

from __future__ import annotations

import fcntl
import os
from io import FileIO
from pathlib import Path

from ...ipc.adapters.digest import Digest
from ...ipc.errors import RequestError
from ...ipc.process.pacer import Pause, no_pause
from .finite_check import FiniteCheck

PIECE_BYTES = 256 << 10  # stays in a core's cache
FICLONE = 0x40049409  # linux/fs.h


def copy_file(
    source: Path, target: Path, check: FiniteCheck | None = None, content: Digest | None = None, pause: Pause = no_pause
) -> None:
    """Copy a file, which shares its blocks if the file system can; its bytes are added to `content`. RequestError if
    `check` finds a fault, or if the source becomes shorter. `pause` is called between pieces."""
    check = check or FiniteCheck((), str(source))
    piece = memoryview(bytearray(PIECE_BYTES))
    with FileIO(source) as old, FileIO(target, "w+") as new:
        is_shared = _share_blocks(old, new)
        for start, stop in check.pieces(os.fstat((new if is_shared else old).fileno()).st_size, PIECE_BYTES):
            part = piece[: stop - start]
            _read(new if is_shared else old, part, source)
            check.check(start, part)
            if content is not None:
                content.update(part)
            if not is_shared:
                _write(new, part)
            pause()
        os.fsync(new.fileno())  # a renamed folder is complete, also after a power failure


def _share_blocks(old: FileIO, new: FileIO) -> bool:
    """Let both files have the same blocks; return whether the file system can."""
    try:
        fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
    except OSError:
        return False
    return True


def _read(file: FileIO, part: memoryview, source: Path) -> None:
    num_read = 0
    while num_read < len(part):
        count = file.readinto(part[num_read:])
        if not count:
            raise RequestError(f"{source} became shorter while it was copied: load the adapter again")
        num_read += count


def _write(file: FileIO, part: memoryview) -> None:
    while part:
        part = part[file.write(part) :]
