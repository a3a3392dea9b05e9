"""UsesFile: the adapters that one process's open requests use, in a file that others read before they drop any.

    <run directory>/adapters-<user>.json        of each frontend: user is its index

It names an adapter before the first of these requests is sent, and for LINGER_S after the last, so that a busy adapter
costs no write a request. The process that replaces this one keeps what it finds there for LEFT_S.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ....ipc.errors import InternalError
from .names_file import replace

LINGER_S = 1.0


class _Uses(msgspec.Struct, omit_defaults=True):
    """The file. `held`: ranks of adapters by digest in hex."""

    held: dict[str, int] = {}


class UsesFile:
    """This process's file beside the names. `held`: what it names, with ranks, by digest."""

    def __init__(self, names: Path, user: str) -> None:
        self._names, self._path = names, names.with_name(f"{names.stem}-{user}{names.suffix}")
        self.held = _read(self._path)

    def add(self, digest: bytes, rank: int) -> None:
        """Name an adapter; InternalError if the file cannot be written."""
        if digest not in self.held:
            self._write({**self.held, digest: rank})

    def keep(self, digests: set[bytes]) -> None:
        """Name no others than these any more. If the file cannot be written, it names more than are used."""
        kept = {digest: rank for digest, rank in self.held.items() if digest in digests}
        if len(kept) < len(self.held):
            with contextlib.suppress(InternalError):
                self._write(kept)

    @property
    def others(self) -> set[bytes]:
        """The adapters that other processes of the engine use."""
        return {digest for path in _paths(self._names) if path != self._path for digest in _read(path)}

    def _write(self, held: dict[bytes, int]) -> None:
        replace(self._path, msgspec.json.encode(_Uses({digest.hex(): rank for digest, rank in held.items()})))
        self.held = held


def used_beside(names: Path) -> set[bytes]:
    """Return the adapters that the processes of an engine use, by the file with its names."""
    return {digest for path in _paths(names) for digest in _read(path)}


def _paths(names: Path) -> Iterator[Path]:
    return names.parent.glob(f"{names.stem}-*{names.suffix}")


def _read(path: Path) -> dict[bytes, int]:
    with contextlib.suppress(FileNotFoundError):
        held = msgspec.json.decode(path.read_bytes(), type=_Uses).held
        return {bytes.fromhex(digest): rank for digest, rank in held.items()}
    return {}
