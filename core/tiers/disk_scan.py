"""Scan of the object files below the folder of a disk source. It changes nothing, and skips files with other names.

A link with the name of a folder is an OSError: objects would be written, and removed, elsewhere.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

import msgspec

NAMESPACE_NAME, _FOLDER = re.compile("[0-9a-f]{16}"), re.compile("[0-9a-f]{2}")
OBJECT_NAME = re.compile("([0-9a-f]{64})(?:-([0-9a-f]{1,16}))?")


class ScannedFile(msgspec.Struct, frozen=True, gc=False):
    """File whose name is that of an object."""

    stamp: int  # time of last use, unix seconds
    key: bytes
    owner: int
    num_bytes: int
    path: str


def namespace_folders(root: str) -> list[str]:
    """Return the folders of objects, one for each namespace. OSError if one is a link."""
    return _folders(root, NAMESPACE_NAME)


def scan(folder: str) -> Iterator[list[ScannedFile]]:
    """Yield the files of one namespace, one list for each sub-folder. OSError if a sub-folder is a link."""
    for path in _folders(folder, _FOLDER):
        files = []
        for entry in os.scandir(path):
            if match := OBJECT_NAME.fullmatch(entry.name):
                status = entry.stat(follow_symlinks=False)
                key, owner = bytes.fromhex(match[1]), int(match[2] or "0", 16)
                files.append(ScannedFile(int(status.st_mtime), key, owner, status.st_size, entry.path))
        yield files


def _folders(folder: str, name: re.Pattern[str]) -> list[str]:
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return []
    named = [entry for entry in entries if name.fullmatch(entry.name)]
    if link := next((entry.name for entry in named if entry.is_symlink()), None):
        raise OSError(errno.ELOOP, f"{link} is a link")
    return [entry.path for entry in named if entry.is_dir(follow_symlinks=False)]
