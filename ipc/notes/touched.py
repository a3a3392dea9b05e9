"""Touched answers: a file with the answers that a core is adding or starting, which the supervisor reads after its end.

    u64 number of entries │ entry being added │ entry 1 │ entry 2 │ …    entry: frontend's identity, 28 bytes │ key u32

The frontend counts the losses of an answer that runs. If a core ends while it adds an answer or admits it to a step,
the frontend does not know yet that the answer ran; this file lets it count the loss all the same. The core writes with
plain stores to a mapped file, so that not even SIGKILL loses an entry.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..sockets.addresses import map_file

_HEAD_BYTES, _IDENTITY_BYTES, _KEY_BYTES = 8, 28, 4
_ENTRY_BYTES = _IDENTITY_BYTES + _KEY_BYTES
_NONE = bytes(_ENTRY_BYTES)
MAX_ENTRIES = 1023  # admitted answers of one turn; further ones are not recorded


class Touched(NamedTuple):
    """An answer: the identity of its frontend on the core's socket, and the frontend's key of the answer."""

    identity: bytes
    key: int


class TouchedAnswers:
    """Owner of the file, in the core. At most one answer is being added; admitted ones stay until `forget_admitted`."""

    def __init__(self, path: Path) -> None:
        """Create the file, or empty the previous core's. ConfigError if the disk is full."""
        self._map = map_file(path, _HEAD_BYTES + (1 + MAX_ENTRIES) * _ENTRY_BYTES)
        self._num_admitted = 0
        self._map[: _HEAD_BYTES + _ENTRY_BYTES] = bytes(_HEAD_BYTES + _ENTRY_BYTES)

    def begin_adding(self, identity: bytes, key: int) -> None:
        self._map[_HEAD_BYTES : _HEAD_BYTES + _ENTRY_BYTES] = _packed(identity, key)

    def end_adding(self) -> None:
        self._map[_HEAD_BYTES : _HEAD_BYTES + _ENTRY_BYTES] = _NONE

    def admit(self, identity: bytes, key: int) -> None:
        """Record an answer that is about to be admitted to a step, if fewer than MAX_ENTRIES are recorded."""
        if self._num_admitted < MAX_ENTRIES:
            self._num_admitted += 1
            start = _HEAD_BYTES + self._num_admitted * _ENTRY_BYTES
            self._map[start : start + _ENTRY_BYTES] = _packed(identity, key)
            self._map[:_HEAD_BYTES] = self._num_admitted.to_bytes(_HEAD_BYTES, "little")

    def forget_admitted(self) -> None:
        """Remove the admitted answers from the file. Call this once the start of these answers was sent to the
        frontends or, if they are suspects of a crash, after the result of their step."""
        if self._num_admitted:
            self._num_admitted = 0
            self._map[:_HEAD_BYTES] = bytes(_HEAD_BYTES)


def read_touched(path: Path) -> list[Touched]:
    """Return the answers that a core touched last: the one that it was adding, or else those that it had admitted.
    Empty if there is no file. The core may have ended."""
    try:
        content = path.read_bytes()
    except OSError:
        return []
    entries = [content[start : start + _ENTRY_BYTES] for start in range(_HEAD_BYTES, len(content), _ENTRY_BYTES)]
    if not entries:
        return []
    num_admitted = min(int.from_bytes(content[:_HEAD_BYTES], "little"), len(entries) - 1)
    found = entries[:1] if entries[0] != _NONE else entries[1 : 1 + num_admitted]
    return [
        Touched(entry[:_IDENTITY_BYTES].rstrip(b"\0"), int.from_bytes(entry[_IDENTITY_BYTES:], "little"))
        for entry in found
    ]


def _packed(identity: bytes, key: int) -> bytes:
    return identity[:_IDENTITY_BYTES].ljust(_IDENTITY_BYTES, b"\0") + key.to_bytes(_KEY_BYTES, "little")
