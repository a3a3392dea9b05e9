"""KeptConnections: the supervisor's duplicates of the HTTP connections, and the frontends' journals.

Each frontend has its own: its successor inherits the journal, and gets the connections when it asks for them. The
supervisor reads no byte of them (listening/keeper.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence

import zmq

from .....ipc.errors import ProtocolError
from .....ipc.process.log import is_worth_a_line
from .....ipc.spec.config.engine_spec import EngineSpec
from ....listening.http_listeners import HttpListeners
from ....listening.journal.journal import Counts, read_counts
from ....listening.journal.pages import new_pages
from ....listening.keeper import KEPT, MAX_FDS, MAX_PACKET_BYTES, OPENED, REPORT, packet, parse

logger = logging.getLogger("tokenloom.http")

MAX_PACKETS = 1000  # read from a channel at a time


class _Kept:
    """One frontend's journal, channel and connections."""

    def __init__(self) -> None:
        self.journal_fd = new_pages()
        self.channel, self.child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._next: tuple[socket.socket, socket.socket] | None = None  # channel and child's end of a spare
        self.fd_by_slot: dict[int, int] = {}
        self._num_malformed = 0

    def receive(self) -> None:
        """Take the messages that wait."""
        self.channel.setblocking(False)
        for _ in range(MAX_PACKETS):
            try:
                data, fds, _, _ = socket.recv_fds(self.channel, MAX_PACKET_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                return
            if not data:
                return
            try:
                left = self._take(*parse(data), fds)
            except ProtocolError as error:
                self._num_malformed += 1
                if is_worth_a_line(self._num_malformed):
                    logger.warning("%d packets are malformed; the last: %s", self._num_malformed, error)
                left = fds
            for fd in left:
                os.close(fd)

    def _take(self, kind: int, slots: Sequence[int], fds: Sequence[int]) -> Sequence[int]:
        """Apply a message; return the descriptors that are not needed."""
        if kind == REPORT:
            self._report(slots[0])
            return fds
        for slot in slots:
            if (fd := self.fd_by_slot.pop(slot, None)) is not None:
                os.close(fd)
        if kind != OPENED:
            return fds
        kept = dict(zip(slots, fds, strict=False))  # a slot that comes twice has the later one
        self.fd_by_slot.update(kept)
        return [fd for fd in fds if fd not in kept.values()]

    def _report(self, first: int) -> None:
        slots = sorted(slot for slot in self.fd_by_slot if slot >= first)[:MAX_FDS]
        with contextlib.suppress(OSError):  # the frontend has ended
            socket.send_fds(self.channel, [packet(KEPT, slots)], [self.fd_by_slot[slot] for slot in slots])

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
        self._next = None

    def _drop_next(self) -> None:
        for end in self._next or ():
            end.close()

    def close(self) -> None:
        self._drop_next()
        for fd in (self.journal_fd, *self.fd_by_slot.values()):
            os.close(fd)
        self.fd_by_slot.clear()
        self.channel.close()
        self.child_end.close()


class KeptConnections:
    """Owner of the descriptors. Registers the channels with `poller`; call `receive` when it wakes."""

    def __init__(self, spec: EngineSpec, listeners: HttpListeners, poller: zmq.Poller) -> None:
        self._poller = poller
        self._kept = [_Kept() for _ in range(spec.config.api_server_count if listeners.fds else 0)]
        for each in self._kept:
            poller.register(each.channel.fileno(), zmq.POLLIN)

    def prepare(self, index: int) -> Sequence[int]:
        """Return the descriptors that the next frontend with this index inherits: of its journal, and of its end of a
        new channel."""
        if not self._kept:
            return ()
        kept = self._kept[index]
        return kept.journal_fd, kept.prepare()

    def hand_over(self, index: int) -> None:
        """Let the frontend that has inherited them go on. The one before must have ended."""
        if self._kept:
            kept = self._kept[index]
            self._poller.unregister(kept.channel.fileno())
            kept.hand_over()
            self._poller.register(kept.channel.fileno(), zmq.POLLIN)

    def receive(self) -> None:
        """Take the messages of all frontends."""
        for each in self._kept:
            each.receive()

    def counts(self) -> Counts:
        """Return what became of the answers that were open when frontends were lost."""
        num_resumed, num_cut = 0, Counter[str]()
        for each in self._kept:
            counts = read_counts(each.journal_fd)
            num_resumed += counts.num_resumed
            num_cut.update(counts.num_cut)
        return Counts(num_resumed, dict(num_cut))

    def close(self) -> None:
        """Close all descriptors, which ends the connections that no frontend has."""
        for each in self._kept:
            with contextlib.suppress(KeyError):
                self._poller.unregister(each.channel.fileno())
            each.close()
        self._kept.clear()
