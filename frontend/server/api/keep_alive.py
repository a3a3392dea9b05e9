"""KeepAlive: sends something in event streams that have nothing to send, since proxies cut connections that are silent.

One timer looks at all open streams, so that a token costs nothing. Knows no events: a stream says what it sends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Protocol

KEEP_ALIVE = "tokenloom.keep_alive"  # key in a scope: the server's KeepAlive
COMMENT = b": keep-alive\n\n"
LOOKS = 3  # in an interval: a stream that has sent nothing since the last look is silent


class SilentStream(Protocol):
    """Interface of an open stream."""

    num_parts: int  # that it has sent

    async def fill_silence(self) -> None:
        """Send something that is no event of the answer."""


class KeepAlive:
    """Owner of the timer. Between two sends of an open stream are at most `interval_s` seconds."""

    def __init__(self, interval_s: float) -> None:
        """`interval_s`: 0 for streams that may be silent."""
        self._look_s = interval_s / LOOKS
        self._num_seen: dict[SilentStream, int] = {}  # parts at the last look
        self._fills: dict[SilentStream, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def watching(self, stream: SilentStream) -> Iterator[None]:
        """Fill the silences of a stream inside the context."""
        if not self._look_s:
            yield
            return
        self._num_seen[stream] = -1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._look_s, self._look)
        try:
            yield
        finally:
            del self._num_seen[stream]
            fill = self._fills.pop(stream, None)
            if fill is not None:
                fill.cancel()

    def _look(self) -> None:
        self._timer = None
        for stream, num_seen in list(self._num_seen.items()):
            fill = self._fills.get(stream)
            is_filling = fill is not None and not fill.done()  # its client does not read
            if stream.num_parts == num_seen and not is_filling:
                self._fills[stream] = asyncio.ensure_future(stream.fill_silence())
            self._num_seen[stream] = stream.num_parts
        if self._num_seen:
            self._timer = asyncio.get_running_loop().call_later(self._look_s, self._look)
