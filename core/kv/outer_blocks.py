"""OuterBlocks: places for KV blocks outside the pool, as the manager uses them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..request import Request
from .block_pool import BlockObserver

POOL = 0  # the place of a block that no outer place has brought: index into PLACES


class OuterIndex(Protocol):
    """Interface of the index of outer blocks of the first KV group."""

    @property
    def keys(self) -> list[bytes]:
        """The keys of these blocks."""
        ...

    def add_observer(self, observer: BlockObserver) -> None: ...


class OuterBlocks(BlockObserver, Protocol):
    """An observer of the pool that keeps the content of blocks elsewhere and brings it back."""

    @property
    def slots(self) -> OuterIndex:
        """The blocks that are in the memory of this host."""
        ...

    def load_prefix(self, request: Request, start: int, end: int, *, has_rows: bool) -> list[tuple[int, int]] | None:
        """Load blocks [start, end) of a request in the next step, up to the first that is in no place. Return (pool
        block, place) for each, all referenced; None if there are too many for a step that also has running rows
        (has_rows)."""
        ...

    def count_hits(self, request: Request, found: Sequence[tuple[int, int]]) -> None:
        """Count the first blocks of an admitted request. found: (pool block, place) of each."""
        ...

    def sent(self, blocks: Iterable[tuple[int, bytes]], salt: str | None = None) -> None:
        """Record that these blocks are written by a step that was sent or is sent next. salt: cache salt of the request
        that fills them."""
        ...

    def hit_shares(self, num_queried: int) -> str:
        """Return the shares of `num_queried` tokens that came from each place, for the log line."""
        ...
