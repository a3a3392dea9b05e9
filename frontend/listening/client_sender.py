"""ClientSender: sends frames on the clients' socket, and limits the bytes that clients leave unread.

ZeroMQ queues the messages that a client does not read, and limits only their number. Deltas wait for credits, but
replies to queries do not, so the bytes are counted here. For each client one frame per TRACKED_BYTES is tracked: once
ZeroMQ has passed it to the kernel, all frames before it have been passed on, too. Knows no sessions and no messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import zmq

from ...ipc.process.malloc import trim_heap

MAX_UNREAD_MESSAGES = 1 << 17  # to one client, beyond the kernel's buffers: one Accepted for each open request
MAX_UNREAD_BYTES = 256 << 20  # of all clients together; a single client may have a fifth of it
TRACKED_BYTES = 64 << 10  # one tracked frame per this many bytes, since tracking costs 40 µs
OVERHEAD_BYTES = 128  # memory that ZeroMQ needs for each message
SHARE = 4  # a client may have a quarter of the bytes that are left
MAX_QUEUES = 8192
TRIM_BYTES = 16 << 20  # once this much has been freed, its pages are returned to the system: 15 ms for 60 MB
COLLECT_S = 1.0  # interval of `tick` while bytes are unread
NEVER = float("inf")


class ClientLost(NamedTuple):
    """The reason why a frame could not be sent."""

    cause: Literal["gone", "slow"]
    detail: str  # an explanation with numbers


class _Queue:
    """The unread bytes of one client, by tracked frame: those up to each, and those after the last tracked frame."""

    __slots__ = ("num_bytes", "num_new_bytes", "tracked")

    def __init__(self) -> None:
        self.tracked: deque[tuple[zmq.MessageTracker, int]] = deque()
        self.num_bytes = 0  # up to the last tracked frame
        self.num_new_bytes = 0

    def track(self, tracker: zmq.MessageTracker) -> None:
        """Record that the last frame sent is tracked, and that the new bytes end with it."""
        self.tracked.append((tracker, self.num_new_bytes))
        self.num_bytes += self.num_new_bytes
        self.num_new_bytes = 0

    def settle(self) -> int:
        """Remove the tracked frames that ZeroMQ no longer holds; return the bytes up to them."""
        before = self.num_bytes
        while self.tracked and self.tracked[0][0].done:
            self.num_bytes -= self.tracked.popleft()[1]
        return before - self.num_bytes


class ClientSender:
    """Sender of frames on a ROUTER socket. Invariant: `num_bytes` is the sum of the queues' bytes."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        trim: Callable[[], None] = trim_heap,
        max_messages: int = MAX_UNREAD_MESSAGES,
        max_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        """To be created before the socket is bound. `max_messages`: limit of unread messages of one client;
        `max_bytes`: limit of the unread bytes of all clients."""
        socket.setsockopt(zmq.SNDHWM, max_messages)
        self._socket, self._trim = socket, trim
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._queues: dict[bytes, _Queue] = {}
        self.num_bytes = self._peak_bytes = 0
        self.next_at = NEVER  # when `tick` has work; monotonic seconds

    def send(self, identity: bytes, frame: bytes) -> ClientLost | None:
        """Send a frame without waiting, and return None. Return the reason if it is not sent: the client is gone, or
        has left too much unread."""
        queue = self._queues.get(identity)
        if queue is None:
            queue = self._add(identity)
        if queue.num_bytes and self._is_full(queue):
            unread, limit = queue.num_bytes >> 20, (self._max_bytes - self.num_bytes) // SHARE >> 20
            others = (self.num_bytes - queue.num_bytes) >> 20
            return ClientLost("slow", f"{unread} MiB unread, at most {limit} MiB may be beside {others} MiB of others")
        num_bytes = queue.num_new_bytes + len(frame) + OVERHEAD_BYTES
        tracked = zmq.Frame(frame, track=True, copy=False) if num_bytes > TRACKED_BYTES else None
        try:
            self._socket.send_multipart([identity, tracked or frame], zmq.NOBLOCK, copy=tracked is None)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return ClientLost("gone", "its connection has ended")
            if error.errno == zmq.EAGAIN:
                return ClientLost("slow", f"{self._max_messages} messages unread, which is the limit")
            raise
        queue.num_new_bytes = num_bytes
        if tracked is not None and tracked.tracker is not None:
            queue.track(tracked.tracker)
            self.num_bytes += num_bytes
            self._peak_bytes = max(self._peak_bytes, self.num_bytes)
        return None

    def _add(self, identity: bytes) -> _Queue:
        if len(self._queues) >= MAX_QUEUES:
            self._collect()
            self._queues = {key: queue for key, queue in self._queues.items() if queue.tracked}
        queue = self._queues[identity] = _Queue()
        return queue

    def _is_full(self, queue: _Queue) -> bool:
        """Return whether the unread bytes of a client exceed 1 / SHARE of the bytes that are left for all clients."""
        self.num_bytes -= queue.settle()
        if SHARE * queue.num_bytes > self._max_bytes - self.num_bytes:
            self._collect()
        return queue.num_bytes > 0 and SHARE * queue.num_bytes > self._max_bytes - self.num_bytes

    def _collect(self) -> None:
        for queue in self._queues.values():
            self.num_bytes -= queue.settle()

    def tick(self, now: float) -> None:
        """Update the unread bytes, once per COLLECT_S while there are any; return freed memory to the system. To be
        called at `next_at`."""
        if now >= self.next_at:
            self._collect()
            self.next_at = NEVER
            if self._peak_bytes - self.num_bytes >= TRIM_BYTES:
                self._trim()
                self._peak_bytes = self.num_bytes
        if self.num_bytes and self.next_at == NEVER:
            self.next_at = now + COLLECT_S
