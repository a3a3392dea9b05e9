"""KeptConnections: accepts the HTTP connections and keeps a descriptor of each, and the frontends' journals.

The supervisor accepts them, not the frontends: a connection that a killed process had accepted alone would be cut. It
gives each to a frontend that takes them, and reads no byte of it (listening/keeper.py). A frontend's successor inherits
the journal, and gets the connections when it asks for them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Sequence

import zmq

from .....ipc.errors import ProtocolError
from .....ipc.process.log import is_worth_a_line
from .....ipc.spec.config.engine_spec import EngineSpec
from ....listening.exhaustion import MAX_ACCEPTS, OUT_OF_RESOURCES, PAUSE_S, warn_of_pause
from ....listening.http_listeners import HttpListeners
from ....listening.journal.journal import Counts, read_counts, read_num_taken
from ....listening.journal.pages import new_pages
from ....listening.keeper import CLOSED, KEPT, MAX_FDS, MAX_NUMBER, MAX_PACKET_BYTES, NEW, REPORT, packet, parse

logger = logging.getLogger("tokenloom.http")

MAX_PACKETS = 1000  # read from a channel at a time


class _Kept:
    """One frontend's journal, channel and connections."""

    def __init__(self) -> None:
        self.journal_fd = new_pages()
        self.channel, self.child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.setblocking(False)
        self._next: tuple[socket.socket, socket.socket] | None = None  # channel and child's end of a spare
        self.fd_by_number: dict[int, int] = {}
        self._last_number = 0
        self._ungiven: deque[int] = deque()  # numbers of connections that the channel had no room for
        self._num_given = 0
        self._num_malformed = 0
        self.has_reported = False  # the frontend knows all that were left, and may get new ones

    @property
    def may_give(self) -> bool:
        return self.has_reported and not self._ungiven

    @property
    def is_full(self) -> bool:
        return bool(self._ungiven)

    @property
    def load(self) -> tuple[int, int]:
        """How many connections wait for the frontend, and how many it has."""
        return self._num_given - read_num_taken(self.journal_fd), len(self.fd_by_number)

    def give(self, connection: socket.socket) -> None:
        """Let the frontend have a new connection."""
        number = self._last_number % MAX_NUMBER + 1
        while number in self.fd_by_number:
            number = number % MAX_NUMBER + 1
        self._last_number = number
        self.fd_by_number[number] = connection.detach()
        self._num_given += 1
        self._ungiven.append(number)
        self.go_on()

    def go_on(self) -> None:
        """Give connections that the channel had no room for."""
        while self._ungiven:
            number = self._ungiven[0]
            fd = self.fd_by_number[number]
            try:
                socket.send_fds(self.channel, [packet(NEW, [number])], [fd])
            except OSError:  # full, or the frontend has ended: its successor gets them
                return
            self._ungiven.popleft()

    def receive(self) -> None:
        """Take the messages that wait."""
        for _ in range(MAX_PACKETS):
            try:
                data, fds, _, _ = socket.recv_fds(self.channel, MAX_PACKET_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                return
            if not data:
                return
            try:
                self._take(*parse(data))
            except ProtocolError as error:
                self._num_malformed += 1
                if is_worth_a_line(self._num_malformed):
                    logger.warning("%d packets are malformed; the last: %s", self._num_malformed, error)
            for fd in fds:  # frontends send none
                os.close(fd)

    def _take(self, kind: int, numbers: Sequence[int]) -> None:
        """Apply a message."""
        if kind == REPORT:
            self._report(numbers[0])
        elif kind == CLOSED:
            for number in numbers:
                if number not in self._ungiven and (fd := self.fd_by_number.pop(number, None)) is not None:
                    os.close(fd)

    def _report(self, first: int) -> None:
        numbers = sorted(number for number in self.fd_by_number if number >= first)[:MAX_FDS]
        with contextlib.suppress(OSError):  # the frontend has ended
            socket.send_fds(self.channel, [packet(KEPT, numbers)], [self.fd_by_number[each] for each in numbers])
        if not numbers:
            self._num_given = read_num_taken(self.journal_fd)
            self.has_reported = True

    def prepare(self) -> int:
        """Make a channel for the next frontend, and return its end of it."""
        self._drop_next()
        self._next = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return self._next[1].fileno()

    def hand_over(self) -> None:
        """Take the last messages of a frontend that has ended, and use the channel of the next one."""
        assert self._next is not None, "prepare comes before hand_over"
        self.receive()
        self.channel.close()
        self.child_end.close()
        self.channel, self.child_end = self._next
        self.channel.setblocking(False)
        self._next = None
        self._ungiven.clear()
        self.has_reported = False

    def _drop_next(self) -> None:
        for end in self._next or ():
            end.close()

    def close(self) -> None:
        self._drop_next()
        for fd in (self.journal_fd, *self.fd_by_number.values()):
            os.close(fd)
        self.fd_by_number.clear()
        self.has_reported = False
        self.channel.close()
        self.child_end.close()


class KeptConnections:
    """Owner of the descriptors. Registers the channels and the listening sockets with `poller`; call `go_on` when it
    wakes, and at `next_at`."""

    def __init__(self, spec: EngineSpec, listeners: HttpListeners, poller: zmq.Poller) -> None:
        self._poller, self._http = poller, listeners
        self._listeners = list(listeners.sockets)
        self._kept = [_Kept() for _ in range(spec.config.api_server_count if self._listeners else 0)]
        self._rests_until = 0.0  # monotonic seconds; accepting is paused
        self._num_pauses = 0
        self._watched: dict[int, int] = {}  # events by descriptor
        self._watch()

    @property
    def next_at(self) -> float:
        """Time at which `go_on` must be called, in monotonic seconds."""
        return self._rests_until or math.inf

    def go_on(self) -> None:
        """Take the messages of all frontends, and accept new connections for them."""
        for each in self._kept:
            each.receive()
            each.go_on()
        if self._rests_until <= time.monotonic():
            self._rests_until = 0.0
            self._accept()
        self._watch()

    def _accept(self) -> None:
        for listener in self._listeners:
            for _ in range(MAX_ACCEPTS):
                takers = [each for each in self._kept if each.may_give]
                if not takers:
                    return
                try:
                    connection, _ = listener.accept()
                except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                    break
                except OSError as error:
                    if error.errno not in OUT_OF_RESOURCES:
                        raise
                    self._pause(error)
                    return
                taker = takers[0] if len(takers) == 1 else min(takers, key=lambda each: each.load)
                taker.give(connection)

    def _pause(self, error: OSError) -> None:
        self._rests_until = time.monotonic() + PAUSE_S
        self._num_pauses += 1
        warn_of_pause(error, self._num_pauses)

    def _watch(self) -> None:
        """Register the descriptors of which an event is awaited now."""
        wanted: dict[int, int] = {}
        for each in self._kept:
            wanted[each.channel.fileno()] = zmq.POLLIN | (zmq.POLLOUT if each.is_full else 0)
        if not self._rests_until and any(each.may_give for each in self._kept):
            for listener in self._listeners:
                wanted[listener.fileno()] = zmq.POLLIN
        if wanted == self._watched:
            return
        for fd in self._watched.keys() - wanted.keys():
            self._poller.unregister(fd)
        for fd, events in wanted.items():
            self._poller.register(fd, events)
        self._watched = wanted

    def prepare(self, index: int) -> Sequence[int]:
        """Return the descriptors that the next frontend with this index inherits: of its journal, and of its end of a
        new channel."""
        if not self._kept:
            return ()
        kept = self._kept[index]
        return kept.journal_fd, kept.prepare()

    def withhold(self, index: int) -> None:
        """Give no new connections to a frontend that is lost, until its successor asks for those that it has left."""
        if self._kept:
            self._kept[index].has_reported = False
            self._watch()

    def hand_over(self, index: int) -> None:
        """Let the frontend that has inherited them go on. The one before must have ended."""
        if self._kept:
            fd = self._kept[index].channel.fileno()
            self._poller.unregister(fd)
            del self._watched[fd]
            self._kept[index].hand_over()
            self._watch()

    def counts(self) -> Counts:
        """Return what became of the answers that were open when frontends were lost."""
        num_resumed, num_cut = 0, Counter[str]()
        for each in self._kept:
            counts = read_counts(each.journal_fd)
            num_resumed += counts.num_resumed
            num_cut.update(counts.num_cut)
        return Counts(num_resumed, dict(num_cut))

    def close(self) -> None:
        """Close all descriptors, of the listening sockets, too. It ends the connections that no frontend has."""
        kept, self._kept = self._kept, []
        self._watch()
        for each in kept:
            each.close()
        self._http.close()
