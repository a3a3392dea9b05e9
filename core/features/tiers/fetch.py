"""A fetch of one prompt's blocks, and an order to load some of them; `Fetches` owns and changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import msgspec

from ....ipc.messages.media import MediaSpan
from ....ipc.messages.tier import BlocksFound, FindGroup
from ...kv.block_hash import object_name
from ...request import Request


class MissingBlocks(NamedTuple):
    """A question for the largest boundary of a prompt at which a request could continue. Boundaries are in blocks."""

    start: int  # index of the first block to look for
    parent: bytes  # key of the block before it
    tokens: bytes  # int32, of the blocks from `start` on
    first_keys: Callable[[int], list[bytes]]  # returns the keys of the first n of them
    media: Sequence[MediaSpan] = ()  # of the prompt
    owner: int = 0  # tenant
    least: int = 0  # the boundary at which it can continue anyway
    groups: Sequence[FindGroup] = (FindGroup(),)

    def up_to(self, end: int, block_size: int) -> MissingBlocks:
        """Return the question for a boundary of at most `end`, which is beyond `start`."""
        count = end - self.start
        groups = [msgspec.structs.replace(group, here=group.here[:count]) for group in self.groups]
        return self._replace(tokens=self.tokens[: 4 * block_size * count], groups=groups)


class Item(NamedTuple):
    """A block of a KV group that a fetch wants. name: that of its object."""

    name: bytes
    key: bytes
    group: int


@dataclass(eq=False)
class Fetch:
    """The loading of the blocks that a prompt needs at a boundary into slots."""

    # Each block passes from right to left, and `items` ends before the first block that is given up:
    #     0 ────────────── num_ready ──────────────── num_ordered ───────── len(items)
    #       in slot or pool          being loaded, or here      waits for a slot
    # Blocks may come in any order, but only those without a gap from the first are of use. `num_ordered` goes back if
    # a block that was loaded has been evicted since. `is_waiting` becomes False once, no later than `give_up_at`; the
    # loads continue until the request is admitted, since it uses the blocks that have come by then, too.
    request: Request | None  # None: a prefetch
    missing: MissingBlocks
    begun_at: float
    grace_s: float
    is_whole: bool  # its blocks are of use only all together, since a group has a window or states; else the first are
    on_end: Callable[[], None] | None = None  # for a fetch without a request
    items: list[Item] = field(default_factory=list)  # of the boundary that was found: first those of windows
    index_by_name: dict[bytes, int] = field(default_factory=dict)  # of these, given up or not
    sources: bytes = b""  # of these: index into SOURCES, or HERE
    bytes_before: list[int] = field(default_factory=list)  # by index: the sizes of all items before, and of all
    end: int = 0  # the boundary that was found
    deepest: int = 0  # the boundary at which the first KV group alone could continue, if it is larger
    num_ordered: int = 0
    num_ready: int = 0  # blocks without a gap from the first, each in a slot that it holds or in the pool
    held: dict[bytes, int] = field(default_factory=dict)  # slots to which it has a reference, by name
    jobs: set[int] = field(default_factory=set)
    give_up_at: float = 0.0
    is_waiting: bool = True  # its request waits for it
    is_asking: bool = False  # the answer to its question has not come
    look_again: Callable[[], MissingBlocks | None] | None = None  # for a second question, if a block could not be read

    def set_items(self, found: BlocksFound, windows_first: Sequence[int], slot_bytes: Sequence[int]) -> Iterable[int]:
        """Want the blocks that the answer to the question has found; return the slots of others, which the fetch held.
        windows_first: the KV groups in the order of loading. slot_bytes: the size of a block of each."""
        keys, sources = list[bytes](), bytearray()
        if any(found.sources):
            keys = self.missing.first_keys(found.end - self.missing.start)
        self.items, self.end = [], found.end
        self.deepest = max(self.deepest, found.deepest)
        for group in windows_first:
            of_group = found.sources[group][: len(keys)]
            sources += of_group
            for key in keys[len(keys) - len(of_group) :]:
                self.items.append(Item(object_name(key, group), key, group))
        self.sources = bytes(sources)
        self.index_by_name = {item.name: index for index, item in enumerate(self.items)}
        self.bytes_before = [0, *accumulate(slot_bytes[item.group] for item in self.items)]
        self.num_ordered = self.num_ready = 0
        return [self.held.pop(name) for name in [*self.held] if name not in self.index_by_name]

    def names_at(self, source: int) -> list[bytes]:
        """Return the names of the blocks that a source has."""
        return [item.name for item, of in zip(self.items, self.sources, strict=True) if of == source]

    @property
    def held_items(self) -> list[Item]:
        """The blocks whose slots it holds, in its order."""
        return [self.items[index] for index in sorted(map(self.index_by_name.__getitem__, self.held))]

    def wants(self, name: bytes) -> bool:
        """Return whether the block is one of this fetch, and the fetch does not hold a slot with it yet."""
        return self.index_by_name.get(name, len(self.items)) < len(self.items) and name not in self.held


@dataclass
class Load:
    """A LoadBlocks order under way."""

    fetch: Fetch | None  # None: the fetch has ended
    source: int
    item_by_slot: dict[int, Item]
    num_blocks: int
    is_void: bool = False  # its blocks must not be found: all content was cleared
