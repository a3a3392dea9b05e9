"""PeerServer: gives other engines the blocks that this engine has in its host tier or on its disk.

    request  find │ serial │ scope │ keys      reply  found │ serial │ number of first keys that this engine has
    request  load │ serial │ scope │ keys      block │ serial │ index │ head │ tail │ payload: a sealed object, for
                                               each block that this engine has; then end │ serial

The scope is the namespace; if its objects have several lengths, that of the payloads of all `keys` follows, u64
little-endian; then the byte 1 if the reply to find shall have a further frame: for each key 1 if this engine has it, or
0. An engine that does not know these forms takes them for another namespace, and declines.

One thread serves one request at a time, from one client after the other. Blocks of the host tier are pinned only while
they are copied, so a client that stops reading occupies memory of this process, within limits, but no slot. To serve a
request, the server never asks other engines.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import zmq
from zmq.utils import z85

from ....ipc.codec import encode_ids
from ....ipc.errors import ConfigError
from ....ipc.sockets.addresses import lock_ipc_address, unlink_ipc_address
from ....ipc.sockets.client_auth import DOMAIN, ZapHandler
from ....ipc.sockets.keys import Keys
from ....ipc.sockets.zmq_sockets import bind, new_socket
from ..source import Item, Namespace, Source
from .sealed_format import SealedFormat, derive

logger = logging.getLogger("tokenloom.tiers")

FIND, LOAD, FOUND, BLOCK, END = b"find", b"load", b"found", b"block", b"end"
KEY_BYTES, SERIAL_BYTES = 32, 8
MAX_KEYS = 16384  # keys in one request
LOAD_BYTES = 16 << 20  # most bytes of blocks in one request; one block may be larger
MAX_SENDING_BYTES = 64 << 20  # blocks that clients have not received yet; one client may have half of it
MAX_QUEUED = 4  # waiting requests of one client; further ones are declined at once
MAX_UNREAD = 256  # unread messages to one client, or from one
TURN_MESSAGES = 64  # messages received before the next request is served
PIN_S, DISK_S, PATIENCE_S = 0.5, 2.0, 5.0
HEARTBEAT_S, DEAD_S = 1, 10  # a client silent for DEAD_S is dropped, with the blocks being sent to it
IDLE_MS, FULL_MS = 200, 5


class HostBlocks(Protocol):
    """Interface of the host tier for the server."""

    def pin(self, keys: Sequence[bytes], deadline: float) -> Sequence[int]:
        """Return the slot of each key; -1 for a key that the host tier does not have, and for all keys if the deadline
        (monotonic seconds) passes first. The slots keep their content until `unpin`."""

    def unpin(self, slots: Sequence[int]) -> None:
        """Release pinned slots; -1 is skipped."""


class _Request(NamedTuple):
    verb: bytes
    serial: bytes
    keys: list[bytes]
    num_bytes: int  # length of each block
    wants_each: bool
    expires: float  # monotonic


class _Transfer(NamedTuple):
    """Block that is being sent to a client."""

    client: bytes
    tracker: zmq.MessageTracker
    num_bytes: int


def scope_of(form: SealedFormat, num_bytes: int, *, wants_each: bool = False) -> bytes:
    """Return the scope of a request for blocks of `num_bytes`."""
    length = num_bytes.to_bytes(8, "little") if len(set(form.slot_bytes)) > 1 else b""
    return form.digest + length + b"\1" * wants_each


def load_size(num_bytes: int, load_bytes: int) -> int:
    """Return the number of blocks of `num_bytes` that one load request may name, at least 1."""
    return max(load_bytes // num_bytes, 1)


def peer_keys(secret: bytes) -> Keys:
    """Return the CURVE keys of engines that share a secret, derived from it."""
    server = z85.encode(derive(secret, b"kv peer server"))
    client = z85.encode(derive(secret, b"kv peer client"))
    return Keys(
        server_public=zmq.curve_public(server).decode(),
        server_secret=server.decode(),
        client_public=zmq.curve_public(client).decode(),
        client_secret=client.decode(),
    )


class PeerServer:
    """Server for other engines. Owns the address, a thread and the blocks that are being sent to clients."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        host: HostBlocks,
        slot: Callable[[int], memoryview],
        disk: Source | None = None,
        mode: int = 0o600,
        load_bytes: int = LOAD_BYTES,
        max_sending_bytes: int = MAX_SENDING_BYTES,
    ) -> None:
        """Listen at `address`; on tcp, if there is a secret, only engines that have it can connect. ConfigError if the
        address cannot be used.

        `slot` returns the content of a slot of the host tier. `mode`: permissions of an ipc socket."""
        self._host, self._slot, self._disk = host, slot, disk
        self._load_bytes, self._max_sending_bytes = load_bytes, max_sending_bytes
        self._ipc_address = address if address.startswith("ipc://") else ""
        self._lock_fd = lock_ipc_address(address, "--kv-listen") if self._ipc_address else -1
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = new_socket(self._context, zmq.ROUTER, max_message_bytes=MAX_KEYS * KEY_BYTES)
        self._socket.copy_threshold = 0  # track every block until it is sent
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNREAD)
        self._socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_S * 1000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_S * 1000)
        self._zap: ZapHandler | None = None
        if secret and not self._ipc_address:
            keys = peer_keys(secret)
            keys.secure_server(self._socket, DOMAIN)
            self._zap = ZapHandler(self._context, keys.client_public)
        try:
            self._door = bind(self._socket, address, mode)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot listen on --kv-listen {address}: {error}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._form: SealedFormat | None = None
        self._queues: dict[bytes, deque[_Request]] = {}  # by client; the client to serve next comes first
        self._transfers: list[_Transfer] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="peer-server", daemon=True)
        self._thread.start()

    def open(self, namespace: Namespace) -> None:
        """Serve the blocks of this namespace, and of no other."""
        self._form = SealedFormat(namespace)

    def close(self) -> None:
        self._is_closing = True
        self._thread.join()
        if self._door is not None:
            self._door.close()
        self._context.destroy(linger=0)
        if self._ipc_address:
            unlink_ipc_address(self._ipc_address)
            os.close(self._lock_fd)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if self._zap is not None:
            poller.register(self._zap.socket, zmq.POLLIN)
        patience_ms = IDLE_MS
        while not self._is_closing:
            poller.poll(patience_ms)
            if self._zap is not None:
                self._zap.answer()
            try:
                self._receive()
                has_served = self._serve_next()
            except Exception:  # a request must not end the service
                logger.exception("a request of another engine failed")
                has_served = True
            patience_ms = IDLE_MS if not self._queues else 0 if has_served else FULL_MS

    def _receive(self) -> None:
        for _ in range(TURN_MESSAGES):
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 4 or frames[0] not in (FIND, LOAD) or len(frames[1]) != SERIAL_BYTES:
                continue
            verb, serial, scope, joined = frames
            if len(joined) % KEY_BYTES:
                continue
            keys = [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]
            num_bytes, wants_each = self._read_scope(scope)
            request = _Request(verb, serial, keys, num_bytes, wants_each, time.monotonic() + PATIENCE_S)
            if num_bytes >= 0 and len(self._queues.get(client, ())) < MAX_QUEUED:
                self._queues.setdefault(client, deque()).append(request)
            else:
                self._decline(client, request)

    def _read_scope(self, scope: bytes) -> tuple[int, bool]:
        """Return the length of the blocks that a request is for, and whether its reply shall tell of each key; -1 for
        another namespace or a length that no blocks have."""
        form = self._form
        if form is not None:
            for num_bytes in form.slot_bytes:
                for wants_each in (False, True):
                    if scope == scope_of(form, num_bytes, wants_each=wants_each):
                        return num_bytes, wants_each
        return -1, False

    def _serve_next(self) -> bool:
        """Serve a request of the first client with enough room for its blocks; return whether there was one."""
        self._transfers = [transfer for transfer in self._transfers if not transfer.tracker.done]
        for client, queue in self._queues.items():
            if self._has_room(client, queue[0]):
                request = queue.popleft()
                del self._queues[client]
                if queue:
                    self._queues[client] = queue  # after the others
                self._serve(client, request)
                return True
        return False

    def _has_room(self, client: bytes, request: _Request) -> bool:
        form = self._form
        if form is None or request.verb == FIND or request.expires < time.monotonic():
            return True
        num_bytes = min(len(request.keys), load_size(request.num_bytes, self._load_bytes)) * request.num_bytes
        sending = [transfer.num_bytes for transfer in self._transfers]
        to_client = [transfer.num_bytes for transfer in self._transfers if transfer.client == client]
        return (not sending or sum(sending) + num_bytes <= self._max_sending_bytes) and (
            not to_client or sum(to_client) + num_bytes <= self._max_sending_bytes // 2
        )

    def _serve(self, client: bytes, request: _Request) -> None:
        form = self._form
        if form is None or request.expires < time.monotonic():
            self._decline(client, request)
        elif request.verb == FIND:
            found = self._find_each(request) if request.wants_each else [encode_ids([self._count(request)])]
            self._reply(client, [FOUND, request.serial, *found])
        else:
            self._send_blocks(client, request, form)

    def _find_each(self, request: _Request) -> list[bytes]:
        """Return two frames: how many of the first keys this engine has, and for each key whether it has it."""
        slots = self._host.pin(request.keys, time.monotonic() + PIN_S)
        self._host.unpin(slots)
        held = bytes(slot >= 0 for slot in slots)
        if self._disk is not None:
            on_disk = self._disk.may_have(request.keys, request.num_bytes, time.monotonic() + PIN_S)
            held = bytes(map(max, held, on_disk))
        return [encode_ids([(held + b"\0").index(0)]), held]

    def _count(self, request: _Request) -> int:
        """Return how many of the first keys this engine has without a gap."""
        keys, size = request.keys, request.num_bytes
        slots = self._host.pin(keys, time.monotonic() + PIN_S)
        self._host.unpin(slots)
        deadline, count = time.monotonic() + PIN_S, 0
        while count < len(keys):
            num_found = 1 if slots[count] >= 0 else self._disk.find(keys[count:], size, deadline) if self._disk else 0
            if not num_found:
                break
            count += num_found
        return count

    def _send_blocks(self, client: bytes, request: _Request, form: SealedFormat) -> None:
        keys = request.keys[: load_size(request.num_bytes, self._load_bytes)]
        for index, payload in enumerate(self._payloads(keys, request.num_bytes)):
            if payload is None:
                continue
            head, tail = form.seal(keys[index], payload)
            if not self._reply(client, [BLOCK, request.serial, encode_ids([index]), head, tail], zmq.SNDMORE):
                return
            tracker = self._socket.send(payload, zmq.NOBLOCK, copy=False, track=True)
            if isinstance(tracker, zmq.MessageTracker):
                self._transfers.append(_Transfer(client, tracker, len(payload)))
        self._reply(client, [END, request.serial])

    def _payloads(self, keys: list[bytes], num_bytes: int) -> list[memoryview | None]:
        """Return copies of the blocks of these keys, each of `num_bytes`; None for a block that this engine does not
        have."""
        payloads: list[memoryview | None] = [None] * len(keys)
        slots = self._host.pin(keys, time.monotonic() + PIN_S)
        try:
            for index, slot in enumerate(slots):
                if slot >= 0 and len(content := self._slot(slot)) == num_bytes:
                    payloads[index] = _new_buffer(num_bytes)
                    payloads[index][:] = content  # type: ignore[index]
        finally:
            self._host.unpin(slots)
        missing = [index for index, payload in enumerate(payloads) if payload is None]
        if self._disk is not None and missing:
            items = [Item(keys[index], _new_buffer(num_bytes)) for index in missing]

            def take(number: int, is_good: bool) -> None:
                if is_good:
                    payloads[missing[number]] = items[number].slot

            self._disk.load(items, time.monotonic() + DISK_S, take)
        return payloads

    def _decline(self, client: bytes, request: _Request) -> None:
        """Reply to a request that this engine has none of the blocks."""
        nothing = [FOUND, request.serial, encode_ids([0])] if request.verb == FIND else [END, request.serial]
        self._reply(client, nothing)

    def _reply(self, client: bytes, frames: list[bytes], flags: int = 0) -> bool:
        """Send a message, unless the client is gone or does not read; return whether it was sent."""
        try:
            self._socket.send_multipart([client, *frames], zmq.NOBLOCK | flags)
        except zmq.ZMQError:
            return False
        return True


def _new_buffer(num_bytes: int) -> memoryview:
    """Return page-aligned memory, as O_DIRECT requires."""
    return memoryview(mmap.mmap(-1, num_bytes))
