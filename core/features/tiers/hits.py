"""Hits: counts the tokens of admitted requests that were found in a cache, by the place that their blocks came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ....ipc.messages.tier import PLACES
from ...kv.outer_blocks import POOL
from ...request import Request

HOST = 1  # index into PLACES
FIRST_SOURCE = 2  # index into PLACES of SOURCES[0]; the other sources follow


class Hits:
    """Token counts by place. At each admission of a request, a block counts once for one place, so that their sum is
    the number of tokens found. A block that was loaded into the pool or a slot counts for its origin when it is first
    used. With several KV groups it counts for the farthest place of its parts. Blocks are named by their objects."""

    def __init__(self, block_size: int, max_origins: int) -> None:
        """max_origins: largest number of loaded blocks whose origin is remembered until they are used."""
        self._block_size, self._max_origins = block_size, max_origins
        self.num_tokens_by_place = [0] * len(PLACES)
        self._origin_by_name: dict[bytes, int] = {}

    def note_origin(self, name: bytes, place: int) -> None:
        """Record that a block was loaded from `place` (index into PLACES), unless it has an origin already."""
        self._origin_by_name.setdefault(name, place)
        if len(self._origin_by_name) > self._max_origins:
            del self._origin_by_name[next(iter(self._origin_by_name))]

    def forget(self, name: bytes) -> None:
        """Forget the origin of a block that has left the pool."""
        self._origin_by_name.pop(name, None)

    def take_origin(self, name: bytes, place: int) -> int:
        """Return the place of a block that is used: its origin, which is forgotten, or without one `place`."""
        return self._origin_by_name.pop(name, place)

    def shares(self, num_queried: int) -> str:
        """Return the shares of tokens that came from each place, as text for the log line; "" if none came from any.
        num_queried: the number of all tokens of the admitted requests."""
        found = zip(PLACES, self.num_tokens_by_place, strict=True)
        shares = [f"{num / max(num_queried, 1):.0%} {place}" for place, num in found if num]
        return f" ({', '.join(shares)})" if shares else ""

    def count(self, request: Request, places: Iterable[int]) -> None:
        """Count the blocks that an admitted request uses, by their places. At the first admission of a request that is
        not resumed, add blocks from outside the pool to the request's own counts, too."""
        is_first = request.num_cached_tokens < 0 and not request.num_output_tokens
        for place, num_blocks in Counter(places).items():
            num_tokens = num_blocks * self._block_size
            self.num_tokens_by_place[place] += num_tokens
            if place != POOL and is_first:
                loaded = request.num_loaded_tokens
                loaded[PLACES[place]] = loaded.get(PLACES[place], 0) + num_tokens
