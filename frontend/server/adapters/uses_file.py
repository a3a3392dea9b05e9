"""UsesFile: a file with the adapters that one frontend's open requests use. Others read it before they drop adapters.

    <run directory>/adapters-<user>.json        user: the index of the frontend

It contains an adapter from before its first request is sent until LINGER_S after its last has ended, so that requests
for a busy adapter cost no writes. The frontend that replaces this one keeps the adapters in the file for LEFT_S.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ....ipc.errors import InternalError, Overloaded
from .names_file import replace

LINGER_S = 1.0  # how long an unused adapter stays in the file


class _Uses(msgspec.Struct, omit_defaults=True):
    """The content of the file. `held`: ranks of adapters, by digest in hex."""

    held: dict[str, int] = {}


class UsesFile:
    """Owner of this process's file, in the folder of the file with the names. `held`: the ranks of the adapters in it,
    by digest."""

    def __init__(self, names: Path, user: str) -> None:
        self._names, self._path = names, names.with_name(f"{names.stem}-{user}{names.suffix}")
        self.held = _read(self._path)

    def add(self, digest: bytes, rank: int) -> None:
        """Add an adapter to the file. Overloaded or InternalError if the file cannot be written."""
        if digest not in self.held:
            self._write({**self.held, digest: rank})

    def keep(self, digests: set[bytes]) -> None:
        """Remove all adapters except these from the file. If it cannot be written, they stay in it until the next
        call."""
        kept = {digest: rank for digest, rank in self.held.items() if digest in digests}
        if len(kept) < len(self.held):
            with contextlib.suppress(InternalError, Overloaded):
                self._write(kept)

    @property
    def others(self) -> set[bytes]:
        """The digests of the adapters that other frontends of the engine use."""
        return {digest for path in _paths(self._names) if path != self._path for digest in _read(path)}

    def _write(self, held: dict[bytes, int]) -> None:
        replace(self._path, msgspec.json.encode(_Uses({digest.hex(): rank for digest, rank in held.items()})))
        self.held = held


def used_beside(names: Path) -> set[bytes]:
    """Return the digests of the adapters that the frontends of an engine use. `names`: its file with the names."""
    return {digest for path in _paths(names) for digest in _read(path)}


def _paths(names: Path) -> Iterator[Path]:
    return names.parent.glob(f"{names.stem}-*{names.suffix}")


def _read(path: Path) -> dict[bytes, int]:
    with contextlib.suppress(FileNotFoundError):
        held = msgspec.json.decode(path.read_bytes(), type=_Uses).held
        return {bytes.fromhex(digest): rank for digest, rank in held.items()}
    return {}
