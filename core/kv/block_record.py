"""BlockRecord: the content keys of the workers' KV blocks, in a file that outlives the core.

    u64 generation of the workers │ namespace, 32 bytes │ key of block 1 │ key of block 2 │ …       0: unknown content

A key is written after the step that filled its block, and erased before a step that overwrites the block is sent. So a
core that replaces a dead one finds the blocks that the same workers have computed, and resubmitted requests continue
from there. A half-written key matches no content. Knows no requests and no steps.
"""

from __future__ import annotations

from pathlib import Path

from ...ipc.sockets.addresses import map_file
from .block_hash import KEY_BYTES, random_namespace

_HEAD_BYTES = 8
_NO_KEY = bytes(KEY_BYTES)


class BlockRecord:
    """File of content keys for one KV group, kept up to date as a BlockObserver."""

    def __init__(self, path: Path, num_blocks: int, generation: int) -> None:
        """Open or create the file; discard the content of another generation. ConfigError if the disk is full."""
        size = _HEAD_BYTES + num_blocks * KEY_BYTES
        is_new = not path.exists() or path.stat().st_size < size
        self._map = map_file(path, size)
        if is_new or self._map[:_HEAD_BYTES] != _head(generation):
            self.cleared(0)
            self.change_namespace(random_namespace())
            self.begin_generation(generation)

    @property
    def namespace(self) -> bytes:
        """The root of all keys in the file."""
        return self._read(0)

    @property
    def key_by_block(self) -> dict[int, bytes]:
        """The keys of the blocks with known content."""
        blocks = range(1, (len(self._map) - _HEAD_BYTES) // KEY_BYTES)
        return {block: key for block in blocks if (key := self._read(block)) != _NO_KEY}

    def _write(self, block: int, key: bytes) -> None:
        start = _HEAD_BYTES + block * KEY_BYTES
        self._map[start : start + KEY_BYTES] = key

    def written(self, group: int, block: int, key: bytes) -> None:
        self._write(block, key)

    def evicted(self, group: int, block: int, key: bytes) -> None:
        self._write(block, _NO_KEY)

    def forgotten(self, group: int, block: int, key: bytes) -> None:
        self._write(block, _NO_KEY)

    def cleared(self, group: int) -> None:
        start = _HEAD_BYTES + KEY_BYTES
        self._map[start:] = bytes(len(self._map) - start)

    def change_namespace(self, namespace: bytes) -> None:
        """Store a new namespace. No request finds keys of the former one again."""
        self._write(0, namespace)

    def begin_generation(self, generation: int) -> None:
        """Store the generation of a new worker group, after `cleared`."""
        self._map[:_HEAD_BYTES] = _head(generation)

    def _read(self, block: int) -> bytes:
        start = _HEAD_BYTES + block * KEY_BYTES
        return self._map[start : start + KEY_BYTES]


def _head(generation: int) -> bytes:
    return generation.to_bytes(_HEAD_BYTES, "little")
