"""PassedStream: a stream of another frontend, passed on to a client, that outlives both frontends.

If the frontend that makes the stream is lost, its successor is asked for the rest. A Place says which part the client
has; the parts of the answer show it to the journal, so that the successor of this frontend asks for the rest, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Protocol

from ..continuation import Continuation
from .events import EventStream


class Place(Protocol):
    """The part of a stream that a client has."""

    @property
    def is_over(self) -> bool:
        """Whether the client has all of it."""

    def parameters(self) -> Mapping[str, str]:
        """Return the query parameters that ask for the rest."""

    def move_past(self, part: bytes, continuation: Continuation) -> None:
        """Move behind a part, and let the continuation of the client's request show it."""


class LostPeer(Exception):
    """The other frontend has ended amid its answer."""


class PassedStream(EventStream):
    """Response of the parts that another frontend sends, and of those that its successor sends after them."""

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        place: Place,
        ask_again: Callable[[], Awaitable[AsyncGenerator[bytes, None]]],
    ) -> None:
        """`parts` raises LostPeer at a loss; then `ask_again` returns those behind `place`."""
        super().__init__(self._follow(parts), bytes)
        self._place, self._ask_again = place, ask_again

    async def _follow(self, parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        while True:
            with contextlib.suppress(LostPeer):
                async with contextlib.aclosing(parts):
                    async for part in parts:
                        self._place.move_past(part, self._continuation)
                        yield part
                return
            if self._place.is_over:
                return
            parts = await self._ask_again()
