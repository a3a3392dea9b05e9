"""Faults of the disk that holds KV blocks: damaged files, and no space. Only while an engine uses its folder."""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

DAMAGES = ("corrupt", "truncate", "swap", "remove", "replace")
SHARE = 0.5  # of all blocks that a fault damages


class DiskFaults:
    """Damages the files of blocks in `folder`, and fills the file system if it is a small one of its own."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._folder, self._rng = folder, rng
        self.counts: Counter[str] = Counter()  # of damaged files

    def files(self) -> list[Path]:
        return sorted(path for path in self._folder.glob("*/??/*") if path.parent.parent.name != "tmp")

    def damage(self, kind: str) -> bool:
        """Damage half of all blocks; False if there are none."""
        files = self.files()
        paths = [path for path in files if self._rng.random() < SHARE]
        for path in paths:
            with contextlib.suppress(OSError):  # the engine has removed it, or the disk is full
                if path.stat().st_size:  # else an earlier fault, or a full disk, has left nothing to damage
                    self._spoil(path, kind, files)
                    self.counts[kind] += 1
        return bool(paths)

    def _spoil(self, path: Path, kind: str, files: Sequence[Path]) -> None:
        """Damage one of `files`."""
        rng, size = self._rng, path.stat().st_size
        if kind == "corrupt":
            with path.open("r+b") as file:
                file.seek(place := rng.randrange(size))
                byte = file.read(1)[0] ^ 1 << rng.randrange(8)
                file.seek(place)
                file.write(bytes([byte]))
        elif kind == "truncate":
            os.truncate(path, rng.randrange(size))
        elif kind == "swap":
            other, between = rng.choice(files), self._folder / "between"
            path.rename(between)
            if other != path:
                other.rename(path)
            between.rename(other)
        elif kind == "remove":
            path.unlink()
        else:
            path.write_bytes(rng.randbytes(size))

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Take all free space of the file system for as long as the context lasts, if it is a mount of its own;
        otherwise make the folder for unfinished files unusable."""
        filler, temporary = self._folder / "filler", self._folder / "tmp"
        if os.path.ismount(self._folder):
            with contextlib.suppress(OSError), filler.open("wb") as file:
                while True:
                    file.write(bytes(1 << 20))
                    file.flush()
            try:
                yield
            finally:
                filler.unlink(missing_ok=True)
        else:
            hidden = self._folder / "hidden"
            with contextlib.suppress(OSError):
                temporary.rename(hidden)
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    hidden.rename(temporary)
