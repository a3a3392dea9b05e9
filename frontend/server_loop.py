"""TurnLoop: the frontend's turns on an asyncio loop, which they share with the HTTP server.

ZeroMQ's descriptors are edge-triggered: they say that something happened, not that something is there. So each turn
ends with a look at what the sockets still hold, and what does is read in the next turn. However many handlers ask for
a turn, one is pending at most: all that they want sent goes out together.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from .process import FrontendProcess


class TurnLoop:
    """`run` returns when the process is stopping, and raises what a turn raises."""

    def __init__(self, process: FrontendProcess) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._is_pending = False
        self._timer: asyncio.TimerHandle | None = None
        self._end: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> None:
        """Have a turn soon; from the loop's own thread."""
        if not self._is_pending and not self._end.done():
            self._is_pending = True
            self._loop.call_soon(self._turn)

    async def run(self) -> None:
        fds = [int(socket.getsockopt(zmq.FD)) for socket in self._process.sockets]
        fds.append(self._process.wakeup_fd)
        for fd in fds:
            self._loop.add_reader(fd, self.wake)
        self.wake()
        try:
            await self._end
        finally:
            for fd in fds:
                self._loop.remove_reader(fd)
            if self._timer is not None:
                self._timer.cancel()

    def _turn(self) -> None:
        self._is_pending = False
        if self._end.done():
            return
        try:
            self._process.turn()
        except Exception as error:
            self._end.set_exception(error)
            return
        if self._process.is_stopping:
            self._end.set_result(None)
        elif any(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for socket in self._process.sockets):
            self.wake()
        else:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wait_s = self._process.seconds_to_tick(time.monotonic())
        if wait_s is not None:
            self._timer = self._loop.call_later(wait_s + 0.001, self.wake)
