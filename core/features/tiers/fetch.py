"""A fetch of one prompt's blocks, and an order to load some of them; `Fetches` owns and changes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ....ipc.messages.media import MediaSpan
from ...request import Request


class MissingBlocks(NamedTuple):
    """The blocks of a prompt to look for in the sources, from block `start` on."""

    start: int
    parent: bytes  # key of the block before them
    tokens: bytes
    first_keys: Callable[[int], list[bytes]]  # returns the keys of the first n of them
    media: Sequence[MediaSpan] = ()  # of the prompt
    owner: int = 0  # tenant


@dataclass(eq=False)
class Fetch:
    """The loading of len(keys) consecutive blocks of a prompt into slots. start: index of the first in the prompt; 0
    for a prefetch, which does not use it."""

    # Each block passes from right to left, and `keys` ends before the first block that is given up:
    #     0 ────────────── num_ready ──────────────── num_ordered ───────── len(keys)
    #       in slot or pool          being loaded, or here      waits for a slot
    # Blocks may come in any order, but only those without a gap from the first are of use. `num_ordered` goes back if
    # a block that was loaded has been evicted since. `is_waiting` becomes False once, no later than `give_up_at`; the
    # loads continue until the request is admitted, since it uses the blocks that have come by then, too.
    request: Request | None  # None: a prefetch
    start: int
    first_keys: Callable[[int], list[bytes]]  # returns the keys of its first n blocks
    begun_at: float
    grace_s: float
    owner: int = 0  # tenant
    on_end: Callable[[], None] | None = None  # for a fetch without a request
    keys: list[bytes] = field(default_factory=list)  # of found blocks
    index_by_key: dict[bytes, int] = field(default_factory=dict)  # of found blocks, given up or not
    sources: bytes = b""  # source of each found block: index into SOURCES
    num_ordered: int = 0
    num_ready: int = 0  # blocks without a gap from the first, each in a slot that it holds or in the pool
    held: dict[bytes, int] = field(default_factory=dict)  # slots to which it has a reference, by key
    jobs: set[int] = field(default_factory=set)
    give_up_at: float = 0.0
    is_waiting: bool = True  # its request waits for it

    def wants(self, key: bytes) -> bool:
        """Return whether the block is one of this fetch, and the fetch does not hold a slot with it yet."""
        return self.index_by_key.get(key, len(self.keys)) < len(self.keys) and key not in self.held


@dataclass
class Load:
    """A LoadBlocks order under way."""

    fetch: Fetch | None  # None: the fetch has ended
    source: int
    key_by_slot: dict[int, bytes]
    num_blocks: int
    is_void: bool = False  # its blocks must not be found: all content was cleared
