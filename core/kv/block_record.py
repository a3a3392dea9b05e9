"""What the workers' KV blocks hold for certain, in a file that outlives the core.

    u64 generation of the workers │ namespace, 32 bytes │ key of block 1 │ key of block 2 │ …       0: nothing certain

A key is written when the result of the step that filled its block is back, and erased before a step that overwrites the
block can be sent. So a core that takes the place of a dead one beside the same workers finds what they have computed,
and requests that are submitted again go on from there. A key that was half written when the core was killed finds
nothing. Knows no requests and no steps.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from ...ipc.errors import ConfigError
from .block_hash import KEY_BYTES, random_namespace

_HEAD_BYTES = 8
_NO_KEY = bytes(KEY_BYTES)


class BlockRecord:
    """Owns the file, which is made if it is missing. What was recorded of another generation is void."""

    def __init__(self, path: Path, num_blocks: int, generation: int) -> None:
        size = _HEAD_BYTES + num_blocks * KEY_BYTES
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            is_new = os.fstat(fd).st_size < size
            os.posix_fallocate(fd, 0, size)  # else a full file system would end the core at a write
            self._map = mmap.mmap(fd, size)
        except OSError as error:
            raise ConfigError(
                f"the run directory cannot hold the {size} bytes of {path}: {error.strerror}: make room, or set "
                "XDG_RUNTIME_DIR to a folder elsewhere"
            ) from None
        finally:
            os.close(fd)
        if is_new or self._map[:_HEAD_BYTES] != _head(generation):
            self.clear()
            self.change_namespace(random_namespace())
            self.begin_generation(generation)

    @property
    def namespace(self) -> bytes:
        """The root of all keys in it."""
        return self._read(0)

    @property
    def key_by_block(self) -> dict[int, bytes]:
        blocks = range(1, (len(self._map) - _HEAD_BYTES) // KEY_BYTES)
        return {block: key for block in blocks if (key := self._read(block)) != _NO_KEY}

    def write(self, block: int, key: bytes) -> None:
        start = _HEAD_BYTES + block * KEY_BYTES
        self._map[start : start + KEY_BYTES] = key

    def erase(self, block: int) -> None:
        self.write(block, _NO_KEY)

    def clear(self) -> None:
        """Nothing is certain of any block."""
        start = _HEAD_BYTES + KEY_BYTES
        self._map[start:] = bytes(len(self._map) - start)

    def change_namespace(self, namespace: bytes) -> None:
        """Keys that were made of another one are found by nobody."""
        self.write(0, namespace)

    def begin_generation(self, generation: int) -> None:
        """`clear` came before."""
        self._map[:_HEAD_BYTES] = _head(generation)

    def _read(self, block: int) -> bytes:
        start = _HEAD_BYTES + block * KEY_BYTES
        return self._map[start : start + KEY_BYTES]


def _head(generation: int) -> bytes:
    return generation.to_bytes(_HEAD_BYTES, "little")
