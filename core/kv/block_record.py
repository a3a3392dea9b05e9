"""BlockRecord: the content keys of the workers' KV blocks, in a file that outlives the core.

    u64 generation of the workers │ namespace, 32 bytes │ key of block 1 │ key of block 2 │ …       0: unknown content

Each KV group has a region of keys, one after another; the first key of each, of the null block, is unused but for the
namespace.

A key is written after the step that filled its block, and erased before a step that overwrites the block is sent. So a
core that replaces a dead one finds the blocks that the same workers have computed, and resubmitted requests continue
from there. A half-written key matches no content. Knows no requests and no steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from ...ipc.sockets.addresses import map_file
from .block_hash import KEY_BYTES, random_namespace

_HEAD_BYTES = 8
_NO_KEY = bytes(KEY_BYTES)


class BlockRecord:
    """File of content keys, kept up to date as a BlockObserver of the pools of all KV groups."""

    def __init__(self, path: Path, num_blocks: Sequence[int], generation: int) -> None:
        """Open or create the file; discard the content of another generation. ConfigError if the disk is full.
        num_blocks: by group, with the null block."""
        self._num_blocks = num_blocks
        self._first = [0, *accumulate(num_blocks)]  # by group: place of its first key
        size = _HEAD_BYTES + sum(num_blocks) * KEY_BYTES
        is_new = not path.exists() or path.stat().st_size < size
        self._map = map_file(path, size)
        if is_new or self._map[:_HEAD_BYTES] != _head(generation):
            for group in range(len(num_blocks)):
                self.cleared(group)
            self.change_namespace(random_namespace())
            self.begin_generation(generation)

    @property
    def namespace(self) -> bytes:
        """The root of all keys in the file."""
        return self._read(0)

    def key_by_block(self, group: int = 0) -> dict[int, bytes]:
        """Return the keys of a group's blocks with known content."""
        first = self._first[group]
        blocks = range(1, self._num_blocks[group])
        return {block: key for block in blocks if (key := self._read(first + block)) != _NO_KEY}

    def _write(self, place: int, key: bytes) -> None:
        start = _HEAD_BYTES + place * KEY_BYTES
        self._map[start : start + KEY_BYTES] = key

    def written(self, group: int, block: int, key: bytes) -> None:
        self._write(self._first[group] + block, key)

    def evicted(self, group: int, block: int, key: bytes, *, is_demoted: bool = False) -> None:
        self._write(self._first[group] + block, _NO_KEY)

    def forgotten(self, group: int, block: int, key: bytes) -> None:
        self._write(self._first[group] + block, _NO_KEY)

    def cleared(self, group: int) -> None:
        start = _HEAD_BYTES + (self._first[group] + 1) * KEY_BYTES
        end = _HEAD_BYTES + self._first[group + 1] * KEY_BYTES
        self._map[start:end] = bytes(end - start)

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
