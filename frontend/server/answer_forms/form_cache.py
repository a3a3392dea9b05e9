"""FormCache: choices of forms that were made before, one file for each, in the user's cache folder.

A file that cannot be read, is not a choice, or cannot be written is as good as none: the form is learned again.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from ....ipc.spec.config.cache_folder import private_cache
from .choose import Choice

FOLDER = "answer_forms"
MAX_KEPT = 256  # files; the oldest go first
MAX_BYTES = 1 << 20  # of a file


class FormCache:
    """Cache of choices by digest. Without a folder of this user's it keeps nothing."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: instead of the one in the user's cache folder."""
        self._folder = folder
        if folder is None:
            with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
                self._folder = private_cache(FOLDER)

    def read(self, digest: str) -> Choice | None:
        """Return the choice that was kept under a digest, in hex; None if there is none."""
        if self._folder is None:
            return None
        try:
            with (self._folder / f"{digest}.json").open("rb") as file:
                return msgspec.json.decode(file.read(MAX_BYTES), type=Choice)
        except (OSError, msgspec.DecodeError):
            return None

    def keep(self, digest: str, choice: Choice) -> None:
        """Keep a choice under a digest, in hex. Another process never reads a part of it."""
        if self._folder is None:
            return
        pending = self._folder / f"{digest}.{os.getpid()}"
        with contextlib.suppress(OSError):
            try:
                pending.write_bytes(msgspec.json.encode(choice))
                pending.rename(self._folder / f"{digest}.json")
            finally:
                pending.unlink(missing_ok=True)
            self._drop_oldest(self._folder)

    def _drop_oldest(self, folder: Path) -> None:
        files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in files[: max(0, len(files) - MAX_KEPT)]:
            path.unlink(missing_ok=True)
