"""PeerSource: blocks of other engines, whose servers (peer_server.py) send them from host memory or disk.

A lookup asks all peers at once, except those whose breaker is open. The peer with the longest run of blocks is
remembered for each key of the run, and the load asks that peer alone. Nothing is stored at a peer. A peer that does not
answer, is slow or sends damaged blocks counts as empty.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import groupby, islice
from typing import NamedTuple

import zmq

from ....ipc.codec import decode_ids
from ....ipc.errors import ProtocolError
from ....ipc.messages.tier import SourceName, SourceState
from ....ipc.sockets.keys import Keys
from ....ipc.sockets.zmq_sockets import new_socket
from ..object_format import HEADER_BYTES
from ..source import Item, Namespace
from .breaker import Breaker
from .peer_server import (
    BLOCK,
    DEAD_S,
    END,
    FIND,
    FOUND,
    HEARTBEAT_S,
    LOAD,
    LOAD_BYTES,
    MAX_KEYS,
    SERIAL_BYTES,
    load_size,
    peer_keys,
    scope_of,
)
from .sealed_format import SealedFormat
from .state_counter import StateCounter

logger = logging.getLogger("tokenloom.tiers")

CONNECT_S = 0.2  # longest wait of a lookup for a peer without a connection
MAX_REMEMBERED = 1 << 17  # keys
MAX_OPEN_REQUESTS = 2  # load requests of one call at one peer
MAX_UNREAD = 64  # received messages that wait on one connection
SILENCE_S = 3.0  # after this time without a message a peer counts as hung, long before a load's deadline
RATE_WEIGHT = 0.2  # weight of the newest load in a peer's rate

Socket = zmq.Socket[bytes]


class _Peer:
    """One engine. Each call uses a connection of its own while it runs; `idle`: connections that no call uses."""

    def __init__(self, address: str, breaker: Breaker) -> None:
        self.address, self.breaker = address, breaker
        self.bytes_per_s = 0.0
        self.idle: list[Socket] = []


class _Found(NamedTuple):
    """Reply of a peer to FIND."""

    num_first: int  # how many of the first keys it has
    held: bytes  # for each key 1 if it has it; empty: it was not asked for each, or does not know this question


class PeerSource:
    """Source for --kv-peers."""

    name: SourceName = "peer"
    num_loaders = 2
    load_batch = 32
    store_batch = 1

    def __init__(
        self,
        addresses: Sequence[str],
        on_change: Callable[[], None],
        new_breaker: Callable[[], Breaker] = Breaker,
        silence_s: float = SILENCE_S,
        load_bytes: int = LOAD_BYTES,
    ) -> None:
        """silence_s: the time without a message after which a peer counts as hung. load_bytes: the most bytes of blocks
        in a request."""
        self._context: zmq.Context[Socket] = zmq.Context()
        self._peers = [_Peer(address, new_breaker()) for address in addresses]
        self._on_change, self._silence_s, self._load_bytes = on_change, silence_s, load_bytes
        self._counter = StateCounter(self.name)
        self._lock = threading.Lock()
        self._form: SealedFormat | None = None
        self._keys: Keys | None = None
        self._serial = 0
        self._peer_by_key: dict[bytes, _Peer] = {}  # oldest first
        self._num_busy, self._is_closed = 0, False

    def open(self, namespace: Namespace) -> None:
        with self._lock:
            for peer in self._peers:
                while peer.idle:
                    peer.idle.pop().close()  # its message limit may be too small for the new blocks
        self._keys = peer_keys(namespace.secret) if namespace.secret else None
        form = self._form = SealedFormat(namespace)
        for peer in self._peers:
            self._release(peer, self._take(peer, form))  # connect in the background
        self._counter.set(is_open=True)

    def find(self, keys: Sequence[bytes], num_bytes: int, deadline: float) -> int:
        form = self._form
        if form is None or not keys or time.monotonic() >= deadline:
            return 0
        best: tuple[int, float, _Peer] | None = None

        def take(peer: _Peer, reply: _Found) -> bool:
            nonlocal best
            if reply.num_first and (best is None or (reply.num_first, peer.bytes_per_s) > best[:2]):
                best = (reply.num_first, peer.bytes_per_s, peer)
            return best is not None and best[0] == len(keys)

        self._ask_all(form, scope_of(form, num_bytes), keys, deadline, take)
        if best is None:
            return 0
        self._remember(keys[: best[0]], best[2])
        return best[0]

    def may_have(self, keys: Sequence[bytes], num_bytes: int, deadline: float) -> list[bool]:
        form, held = self._form, bytearray(len(keys))
        if form is None or not keys or time.monotonic() >= deadline:
            return [False] * len(keys)

        def take(peer: _Peer, reply: _Found) -> bool:
            held[:] = map(max, held, reply.held or bytes(len(keys)))
            return all(held)

        self._ask_all(form, scope_of(form, num_bytes, wants_each=True), keys, deadline, take)
        return list(map(bool, held))

    def _ask_all(
        self,
        form: SealedFormat,
        scope: bytes,
        keys: Sequence[bytes],
        deadline: float,
        take: Callable[[_Peer, _Found], bool],
    ) -> None:
        """Ask all peers that their breakers admit for these keys. `take` gets each reply, and returns whether the
        others are of no use any more."""
        asked = {self._take(peer, form): peer for peer in self._peers if peer.breaker.admit()}
        request = [FIND, self._next_serial(), scope, b"".join(keys[:MAX_KEYS])]
        unsent, waiting, is_enough = set(asked), set(asked), False
        connect_by = time.monotonic() + CONNECT_S
        while waiting and not is_enough and time.monotonic() < deadline:
            if unsent and time.monotonic() >= connect_by:
                for socket in unsent:
                    self._fail(asked[socket], socket, "find", "no connection")
                waiting -= unsent
                unsent = set()
            until = min(deadline, connect_by) if unsent else deadline
            for socket in _poll(waiting, unsent, until):
                if socket in unsent:
                    with contextlib.suppress(zmq.Again):
                        socket.send_multipart(request, zmq.NOBLOCK)
                        unsent.remove(socket)
                    continue
                reply = _read_found(socket, request[1], len(keys))
                if reply is None:
                    continue
                waiting.remove(socket)
                self._succeed(asked[socket], socket, "find")
                is_enough |= take(asked[socket], reply)
        for socket in waiting:
            if is_enough:
                asked[socket].breaker.cancelled()
                self._release(asked[socket], socket)
            else:
                self._fail(asked[socket], socket, "find", "no answer in time")

    def load(self, items: Sequence[Item], deadline: float, on_loaded: Callable[[int, bool], None]) -> None:
        form, waiting = self._form, dict.fromkeys(range(len(items)))
        indexes_by_peer: dict[_Peer, list[int]] = {}
        for index, item in enumerate(items):
            if (peer := self._peer_by_key.get(item.key)) is not None:
                indexes_by_peer.setdefault(peer, []).append(index)

        def report(index: int, is_good: bool) -> None:
            del waiting[index]
            on_loaded(index, is_good)

        for peer, indexes in indexes_by_peer.items():
            if form is not None and time.monotonic() < deadline and peer.breaker.admit():
                self._load_from(peer, form, items, indexes, deadline, report)
        for index in waiting:
            on_loaded(index, False)

    def store(self, items: Sequence[Item]) -> list[bool]:
        return [False] * len(items)

    def clear(self) -> None:
        """Forget which peer has which block. The blocks themselves belong to the other engines."""
        with self._lock:
            self._peer_by_key.clear()

    def state(self) -> SourceState:
        self._counter.set(is_broken=all(peer.breaker.is_broken for peer in self._peers))
        return self._counter.state

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for peer in self._peers:
                for socket in peer.idle:
                    socket.close()
            is_idle = self._num_busy == 0
        if is_idle:
            self._context.term()

    def _load_from(
        self,
        peer: _Peer,
        form: SealedFormat,
        items: Sequence[Item],
        indexes: list[int],
        deadline: float,
        report: Callable[[int, bool], None],
    ) -> None:
        """Load items from one peer, with up to MAX_OPEN_REQUESTS requests at a time."""
        socket, started = self._take(peer, form), time.monotonic()
        num_bytes, num_good, num_bad = 0, 0, 0
        batches = self._batches(items, indexes)
        expected: dict[bytes, dict[int, int]] = {}  # index of an item, by serial and index in the request
        try:
            while batches or expected:
                if batches and len(expected) < MAX_OPEN_REQUESTS:
                    self._wait(socket, zmq.POLLOUT, deadline)
                    serial, batch = self._next_serial(), batches.pop(0)
                    expected[serial] = dict(enumerate(batch))
                    keys = b"".join(items[index].key for index in batch)
                    scope = scope_of(form, len(items[batch[0]].slot))
                    socket.send_multipart([LOAD, serial, scope, keys], zmq.NOBLOCK)
                    continue
                self._wait(socket, zmq.POLLIN, deadline)
                match [frame.buffer for frame in socket.recv_multipart(zmq.NOBLOCK, copy=False)]:
                    case [verb, label] if verb == END:
                        for index in expected.pop(bytes(label), {}).values():
                            report(index, False)
                    case [verb, label, number, head, tail, payload] if verb == BLOCK:
                        index = expected[bytes(label)].pop(decode_ids(bytes(number))[0])
                        defect = _copy(form, items[index], head, payload, tail)
                        if defect is not None:
                            self._counter.reject(defect)
                        num_bad += defect is not None
                        num_good += defect is None
                        num_bytes += form.num_bytes(len(payload)) if defect is None else 0
                        report(index, defect is None)
                    case _:
                        raise ConnectionError("it does not speak this protocol")
        except (zmq.ZMQError, OSError, ProtocolError, LookupError) as error:
            self._fail(peer, socket, "load", str(error) or type(error).__name__)
            return
        finally:
            elapsed_s = time.monotonic() - started
            self._counter.add(num_read=num_good, read_bytes=num_bytes, read_s=elapsed_s)
        if num_bad:
            self._fail(peer, socket, "load", f"{num_bad} damaged blocks")
            return
        rate = num_bytes / max(elapsed_s, 1e-6)
        peer.bytes_per_s += RATE_WEIGHT * (rate - peer.bytes_per_s)
        self._succeed(peer, socket, "load")

    def _batches(self, items: Sequence[Item], indexes: Sequence[int]) -> list[list[int]]:
        """Divide items into requests, each with items of one length that follow each other."""
        batches = []
        for num_bytes, run in groupby(indexes, key=lambda index: len(items[index].slot)):
            left, size = list(run), load_size(num_bytes, self._load_bytes)
            batches += [left[start : start + size] for start in range(0, len(left), size)]
        return batches

    def _wait(self, socket: Socket, event: int, deadline: float) -> None:
        """Wait until the socket can send or receive (`event`). TimeoutError after the deadline or a long silence."""
        remaining_ms = int(min(deadline - time.monotonic(), self._silence_s) * 1000)
        if remaining_ms <= 0 or not socket.poll(remaining_ms, event):
            raise TimeoutError("no answer in time")

    def _take(self, peer: _Peer, form: SealedFormat) -> Socket:
        """Return a connection to a peer for one call."""
        with self._lock:
            self._num_busy += 1
            if peer.idle:
                return peer.idle.pop()
        socket = new_socket(self._context, zmq.DEALER, max_message_bytes=max(form.slot_bytes) + HEADER_BYTES)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # no message is queued for a peer without a connection
        socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_S * 1000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_S * 1000)
        if self._keys is not None and peer.address.startswith("tcp://"):
            self._keys.secure_client(socket)
        socket.connect(peer.address)
        return socket

    def _release(self, peer: _Peer, socket: Socket | None) -> None:
        """Keep a connection for the next call. None: the call has already closed its connection."""
        with self._lock:
            self._num_busy -= 1
            if socket is not None and not self._is_closed:
                peer.idle.append(socket)
                return
            is_last = self._is_closed and self._num_busy == 0
        if socket is not None:
            socket.close()
        if is_last:
            self._context.term()

    def _succeed(self, peer: _Peer, socket: Socket, kind: str) -> None:
        self._release(peer, socket)
        if peer.breaker.succeeded(kind):
            logger.info("the peer %s answers again", peer.address)
            self._on_change()

    def _fail(self, peer: _Peer, socket: Socket, kind: str, error: str) -> None:
        socket.close()  # so that late messages are dropped
        self._release(peer, None)
        self._counter.add(num_failed=1)
        self._counter.set(error=f"{peer.address}: {error}")
        if peer.breaker.failed(kind):
            logger.warning("the peer %s fails and is not used for now: %s", peer.address, error)
            self._on_change()

    def _next_serial(self) -> bytes:
        with self._lock:
            self._serial += 1
            return self._serial.to_bytes(SERIAL_BYTES)

    def _remember(self, keys: Sequence[bytes], peer: _Peer) -> None:
        with self._lock:
            self._peer_by_key.update(dict.fromkeys(keys, peer))
            for key in list(islice(self._peer_by_key, max(len(self._peer_by_key) - MAX_REMEMBERED, 0))):
                del self._peer_by_key[key]


def _copy(form: SealedFormat, item: Item, head: memoryview, payload: memoryview, tail: memoryview) -> str | None:
    """Copy a block into its slot and check it there; return its defect, or None if it has none."""
    if len(payload) != len(item.slot):
        return "length"
    item.slot[:] = payload
    return form.find_defect(item.key, head, item.slot, tail)


def _read_found(socket: Socket, serial: bytes, num_keys: int) -> _Found | None:
    """Receive a reply to FIND; return None for a late reply to an earlier request or a malformed message."""
    match socket.recv_multipart(zmq.NOBLOCK):
        case [verb, its_serial, number, *each] if verb == FOUND and its_serial == serial and len(number) == 4:
            count = min(max(int.from_bytes(number, "little", signed=True), 0), num_keys)
            return _Found(count, each[0] if each and len(each[0]) == num_keys else b"")
    return None


def _poll(waiting: set[Socket], unsent: set[Socket], until: float) -> list[Socket]:
    """Return the sockets that are ready before `until`: those in `unsent` for sending, the others for receiving."""
    poller = zmq.Poller()
    for socket in waiting:
        poller.register(socket, zmq.POLLOUT if socket in unsent else zmq.POLLIN)
    return [socket for socket, _ in poller.poll(max(int((until - time.monotonic()) * 1000), 0))]
