"""OuterBlocks: places for KV blocks outside the pools, as the manager uses them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..request import Request
from .block_pool import BlockObserver
from .computed import Computed

POOL = 0  # the place of a block that no outer place has brought: index into PLACES


class OuterIndex(Protocol):
    """Interface of the index of outer blocks."""

    def lookup(self, key: bytes, group: int) -> int | None:
        """Return the place of a group's block; None if it has none."""
        ...

    @property
    def keys(self) -> list[bytes]:
        """The keys of the blocks of the first group."""
        ...

    def add_observer(self, observer: BlockObserver) -> None:
        """Let an observer follow the blocks of the first group."""
        ...


class OuterBlocks(BlockObserver, Protocol):
    """An observer of the pools that keeps the content of blocks elsewhere and brings it back."""

    @property
    def slots(self) -> OuterIndex:
        """The blocks that are in the memory of this host."""
        ...

    def take(self, request: Request, computed: Computed, *, has_rows: bool) -> list[list[int]] | None:
        """Return by group the blocks that a request needs, all referenced, and count them as hits. The next step loads
        those that no pool has. None if these are too many for a step that also has running rows (has_rows)."""
        ...

    def deepest(self, request: Request) -> int:
        """Return the boundary at which the first group alone could continue with blocks of places that are farther, as
        far as it is known."""
        ...

    def sent(self, group: int, blocks: Sequence[tuple[int, bytes, bool]], salt: str | None = None) -> None:
        """Record that blocks are written by a step that was sent or is sent next: (block, key, whether others are
        likely to need it). salt: cache salt of the request that fills them."""
        ...

    def keep(self, group: int, keys: Iterable[bytes]) -> None:
        """Record that other requests are likely to need these blocks of the pool."""
        ...

    def hit_shares(self, num_queried: int) -> str:
        """Return the shares of `num_queried` tokens that came from each place, for the log line."""
        ...
