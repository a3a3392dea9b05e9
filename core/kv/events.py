"""KVEvents: messages for routers about the blocks that requests can find here, in the form of vLLM's KV events.

An event is a map with the name of its struct in `type`, as vLLM writes it since 0.28. A block is reported as stored
when the workers have written it, and as removed before it is overwritten. Blocks of private answers are never reported.
Blocks in slots are reported without tokens, as vLLM does. A block whose tokens are unknown, because it was found in a
record or returned from a slot, is reported when a request first uses it. The salt of a tenant is not published; a
number made from it distinguishes the tenants' blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from .block_hash import salted_root

MEDIUM_POOL, MEDIUM_SLOTS = "GPU", "CPU"  # vLLM's names, on any device
_SALT_MARK = bytes(32)  # stands for the namespace
ExtraKeys: TypeAlias = tuple[str | tuple[str, int], ...]  # (name, start relative to the block) for a medium


class BlockStored(msgspec.Struct, tag=True):
    """Blocks that are now stored. In the pool they follow one another, and all their tokens are here; in slots they are
    in no order, without tokens."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None  # the adapter's digest in hex: a name may get another adapter
    extra_keys: list[ExtraKeys | None] | None  # for each block: its media, then its salt; None: no block has any
    group_idx: int


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[bytes]
    medium: str
    group_idx: int


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class BlockContent(NamedTuple):
    parent: bytes | None  # key of the previous block; None for the first block
    token_ids: bytes  # int32
    salt: str | None
    adapter: str | None
    media: tuple[tuple[str, int], ...] = ()


class KVEvents:
    """Collector of the events since the last `take`, with the set of reported keys. It is an observer of the pool."""

    def __init__(self, block_size: int, keys: Iterable[bytes]) -> None:
        """keys: the keys of blocks that are already in the pool, with unknown tokens."""
        self._block_size = block_size
        self._content_by_key: dict[bytes, BlockContent] = {}  # for blocks that are not written yet
        self._untold = set(keys)  # blocks that are written but have unknown tokens
        self._told: set[bytes] = set()
        self._events: list[Event] = [AllBlocksCleared()]  # subscribers may know the blocks of an earlier core
        self.slots: _SlotEvents | None = None

    def watch_slots(self, keys: Iterable[bytes]) -> _SlotEvents:
        """Return the observer of the slots. keys: the keys of blocks that are already in slots."""
        self.slots = _SlotEvents(self._events, self._block_size, keys)
        return self.slots

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events = self._events[:]
        self._events.clear()
        return events

    def describe(self, key: bytes, content: BlockContent) -> None:
        """Set the content of a block in the pool's index, and report the block if it is already written."""
        if key in self._told:
            return
        if key in self._untold:
            self._untold.discard(key)
            self._tell(key, content)
        else:
            self._content_by_key[key] = content

    def _tell(self, key: bytes, content: BlockContent) -> None:
        self._told.add(key)
        token_ids = np.frombuffer(content.token_ids, np.int32).tolist()
        salt = () if content.salt is None else (salted_root(_SALT_MARK, content.salt).hex()[:16],)
        extra: ExtraKeys | None = (*content.media, *salt) or None
        last = self._events[-1] if self._events else None
        is_of_pool = isinstance(last, BlockStored) and last.medium == MEDIUM_POOL
        if isinstance(last, BlockStored) and is_of_pool and last.block_hashes[-1] == content.parent:
            if last.extra_keys is None and extra is not None:
                last.extra_keys = [None] * len(last.block_hashes)
            if last.extra_keys is not None:
                last.extra_keys.append(extra)
            last.block_hashes.append(key)
            last.token_ids += token_ids
            return
        parent, size, adapter = content.parent, self._block_size, content.adapter
        extras: list[ExtraKeys | None] | None = None if extra is None else [extra]
        self._events.append(BlockStored([key], parent, token_ids, size, None, MEDIUM_POOL, adapter, extras, 0))

    def written(self, group: int, block: int, key: bytes) -> None:
        content = self._content_by_key.pop(key, None)
        if content is not None:
            self._tell(key, content)
        elif key not in self._told:
            self._untold.add(key)

    def evicted(self, group: int, block: int, key: bytes, *, is_demoted: bool = False) -> None:
        self._content_by_key.pop(key, None)
        self._untold.discard(key)
        if key in self._told:
            self._told.discard(key)
            _remove(self._events, key, MEDIUM_POOL)

    forgotten = evicted

    def cleared(self, group: int) -> None:
        """Report that the pool is empty; slots keep their content."""
        for key in self._told if self.slots is not None else ():
            _remove(self._events, key, MEDIUM_POOL)
        self._content_by_key.clear()
        self._untold.clear()
        if self._told and self.slots is None:
            self._events.append(AllBlocksCleared())
        self._told.clear()

    def change_namespace(self) -> None:
        """Report that no block can be found any more, in the pool or in slots."""
        if self.slots is not None:
            self.slots.told.clear()
        self._content_by_key.clear()
        self._untold.clear()
        self._told.clear()
        self._events.append(AllBlocksCleared())


class _SlotEvents:
    """Observer of the slots, which adds events to those of KVEvents."""

    def __init__(self, events: list[Event], block_size: int, keys: Iterable[bytes]) -> None:
        self._events, self._block_size = events, block_size
        self.told: set[bytes] = set()
        for key in keys:
            self.written(0, 0, key)

    def written(self, group: int, block: int, key: bytes) -> None:
        self.told.add(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.medium == MEDIUM_SLOTS:
            last.block_hashes.append(key)
        else:
            self._events.append(BlockStored([key], None, [], self._block_size, None, MEDIUM_SLOTS, None, None, 0))

    def evicted(self, group: int, block: int, key: bytes, *, is_demoted: bool = False) -> None:
        if key in self.told:
            self.told.discard(key)
            _remove(self._events, key, MEDIUM_SLOTS)

    forgotten = evicted

    def cleared(self, group: int) -> None:
        for key in list(self.told):
            self.evicted(group, 0, key)


def _remove(events: list[Event], key: bytes, medium: str) -> None:
    last = events[-1] if events else None
    if isinstance(last, BlockRemoved) and last.medium == medium:
        last.block_hashes.append(key)
    else:
        events.append(BlockRemoved([key], medium, 0))
