"""ZmqTransport: the socket of one client and its daemon thread, which sends pings while the program computes.

Callers queue commands and wake the thread through an eventfd; the thread blocks in poll, without a timeout while
nothing is open. Knows sockets, threads and time; ClientProtocol decides about messages. The socket's monitor detects a
lost frontend; then a new socket with the same identity replaces the old one, so that no stale message is sent. If there
are several addresses, it uses one, and tries the next when that is lost.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import zmq

from ...ipc.codec import Decoder
from ...ipc.errors import ConfigError, InternalError, Overloaded, ProtocolError, RequestError, TokenloomError
from ...ipc.messages.client import ClientMessage, FrontendMessage, GetInfo, Info
from ...ipc.params.sampling_params import TIMEOUT_S
from ...ipc.process.awake_clock import AwakeClock
from ...ipc.shortages.threads import start_thread
from ...ipc.sockets.keys import Keys
from ...ipc.sockets.zmq_sockets import MAX_CLIENT_MESSAGE_BYTES, new_socket, receive
from .protocol import ClientProtocol, QueryResult, check_reply
from .transport import CallbackThread, Transport, encode_client_message, wait_for_end

T = TypeVar("T")

LONGEST_WAIT_S = 86400.0  # limit of one poll: its milliseconds have 31 bits
MAX_MESSAGES_PER_TURN = 256  # most messages received before commands and pings are handled
BEAT_S = 1.0  # beat of the clock that measures the engine's silence
FIRST_HOP_S = 0.2
REOPEN_INTERVAL_S = 0.1  # least time between reconnects, for a peer that accepts connections and closes them at once
_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class ZmqTransport(Transport):
    """Transport over ZeroMQ. The constructor does not wait for the engine; `wait_connected` does."""

    def __init__(
        self,
        address: str | Sequence[str],
        connect_timeout_s: float = 10.0,
        reconnect_timeout_s: float = 30.0,
        key_file: str | os.PathLike[str] | None = None,
    ) -> None:
        for name, timeout_s in (("connect_timeout_s", connect_timeout_s), ("reconnect_timeout_s", reconnect_timeout_s)):
            TIMEOUT_S.check(name, timeout_s)
        self._keys = None if key_file is None else Keys.load(os.fspath(key_file))
        self.addresses = _check_addresses(address)
        places = " or ".join(self.addresses)
        super().__init__(ClientProtocol(places, self._send, connect_timeout_s, reconnect_timeout_s))
        self._place = secrets.randbelow(len(self.addresses))  # so that clients spread over the frontends
        self._hop_s, self._hop_at = FIRST_HOP_S, math.inf  # when to try the next address, while no frontend answers
        self._identity = secrets.token_bytes(16)
        self._decoder: Decoder[FrontendMessage] = Decoder(FrontendMessage)
        self._lock = threading.Lock()  # guards _is_closed, _is_woken and _wake_fd until it is closed
        self._is_closed = False
        self._is_woken = False
        self._pid = os.getpid()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context()
        self._context.setsockopt(zmq.MAX_SOCKETS, 64)
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()  # of both sockets and _wake_fd
        self._has_shaken_hands = False
        self._clock = AwakeClock(BEAT_S)  # used by the thread once it runs
        self._opened_at = 0.0
        try:
            self._open(self._clock.now)
            self._callbacks = CallbackThread("tokenloom callbacks")
            try:
                self._thread = start_thread("tokenloom connection", self._run)
            except Overloaded:
                self._callbacks.stop()
                raise
        except (zmq.ZMQError, Overloaded) as error:
            self._close_sockets()
            self._context.destroy(linger=0)
            os.close(self._wake_fd)
            if isinstance(error, Overloaded):
                raise
            raise ConfigError(f"cannot connect to {places}: {error.strerror}") from None

    # ── called from any thread ──

    def wait(self, queue: SimpleQueue[T], timeout_s: float | None = None) -> T:
        return queue.get(timeout=timeout_s)

    def call_later(self, function: Callable[[], None]) -> None:
        self._callbacks.run(function)

    def wait_connected(self) -> None:
        """Block until an engine replies. EngineDead if none does within connect_timeout_s, ProtocolError if it refuses
        this client."""
        replies: SimpleQueue[QueryResult] = SimpleQueue()
        self.query(GetInfo, replies.put)
        check_reply(replies.get(), Info)

    def fail(self, error: TokenloomError) -> None:
        """End all open and later requests with `error`. To be called when the engine's process has ended."""
        with contextlib.suppress(RequestError):
            self._command(partial(self._protocol.end, error))

    def close(self) -> None:
        with self._lock:
            if self._is_closed or os.getpid() != self._pid:
                return
            self._is_closed = True
            os.eventfd_write(self._wake_fd, 1)
        if threading.current_thread() is not self._thread:  # garbage collection may run in any thread
            wait_for_end(self._thread)
            wait_for_end(self._callbacks.thread)

    def _command(self, command: Callable[[], None]) -> None:
        if os.getpid() != self._pid:
            raise RequestError("this client was created before a fork: create a new one in the child process")
        with self._lock:
            if self._is_closed:
                raise RequestError("this client is closed: create a new one")
            self._commands.append(command)
            if not self._is_woken:
                self._is_woken = True
                os.eventfd_write(self._wake_fd, 1)

    # ── the thread ──

    def _run(self) -> None:
        try:
            timeout_s: float | None = 0.0
            while not self._is_closed:
                timeout_s = self._turn(timeout_s)
            self._run_commands()
            self._protocol.end(RequestError("the client was closed while the request was open"))
        except Exception as error:  # after a bug in this thread callers must not wait forever
            self._close_sockets()
            self._protocol.end(InternalError(f"the connection failed: {type(error).__name__}: {error}"))
            while not self._is_closed:
                self._wait(None)
                self._run_commands()
        finally:
            self._close_sockets()
            self._context.term()
            self._callbacks.stop()
            with self._lock:
                self._is_closed = True
                os.close(self._wake_fd)
            self._run_commands()

    def _turn(self, timeout_s: float | None) -> float | None:
        """Wait for events and handle them; return the timeout of the next turn in seconds, None for no timeout."""
        # A frontend ends the requests of a client that sends nothing for LEASE_S, 3 s; `tick` sends a ping each second.
        # So a turn must be short: it receives at most MAX_MESSAGES_PER_TURN messages, and the program's callbacks run
        # in another thread. Messages are read before `tick` checks the frontend's silence: messages that waited while
        # this program was suspended prove that the frontend is alive.
        ready = self._wait(timeout_s)
        has_more = self._receive()
        is_disconnected = self._monitor in ready and self._read_monitor()
        self._run_commands()
        now = self._clock.look()
        protocol = self._protocol
        next_due = protocol.tick(now)
        if protocol.state == "ended" or (protocol.state == "lost" and not protocol.needs_reconnect):
            self._close_sockets()
        elif is_disconnected or protocol.needs_reconnect or self._must_hop(now):
            reopen_at = self._opened_at + REOPEN_INTERVAL_S
            if now >= reopen_at:
                self._place = (self._place + 1) % len(self.addresses)
                self._reopen(now)
                return 0.0
            protocol.needs_reconnect = True
            next_due = reopen_at if next_due is None else min(next_due, reopen_at)
        elif self._hop_at < math.inf:
            next_due = self._hop_at if next_due is None else min(next_due, self._hop_at)
        if has_more:
            return 0.0
        return None if next_due is None else self._clock.patience_s(next_due)

    def _must_hop(self, now: float) -> bool:
        """Return whether to try the next address, since no frontend has answered at this one. The time to wait doubles
        with each try, so that frontends under load can answer."""
        if self._protocol.state != "greeting" or len(self.addresses) == 1:
            self._hop_s, self._hop_at = FIRST_HOP_S, math.inf
        elif self._hop_at == math.inf:
            self._hop_at = now + self._hop_s
        elif now >= self._hop_at:
            self._hop_s, self._hop_at = 2 * self._hop_s, math.inf
            return True
        return False

    def _wait(self, timeout_s: float | None) -> dict[object, int]:
        """Poll for at most `timeout_s` (None: no limit). Return the ready sockets and descriptors, with their
        events."""
        timeout_ms = None if timeout_s is None else math.ceil(min(timeout_s, LONGEST_WAIT_S) * 1000)
        ready: dict[object, int] = dict(self._poller.poll(timeout_ms))
        if self._wake_fd in ready:
            with self._lock:
                self._is_woken = False
                os.eventfd_read(self._wake_fd)
        return ready

    def _receive(self) -> bool:
        """Receive and handle at most MAX_MESSAGES_PER_TURN messages; return whether more may be waiting."""
        if self._socket is None:
            return False
        now, num_messages = self._clock.look(), 0
        for frames in itertools.islice(receive(self._socket), MAX_MESSAGES_PER_TURN):
            num_messages += 1
            try:
                message = self._decoder.decode(frames[-1])
            except ProtocolError as error:
                self._protocol.on_malformed(error)
                continue
            self._protocol.receive(message, now)
        return num_messages == MAX_MESSAGES_PER_TURN

    def _read_monitor(self) -> bool:
        """Read the monitor's events. Return whether the peer disconnected after a handshake; before one, ZeroMQ retries
        by itself."""
        is_disconnected = False
        while self._monitor is not None and self._monitor.poll(0):
            event = int.from_bytes(self._monitor.recv_multipart()[0][:2], "little")
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._has_shaken_hands = True
            elif event == zmq.EVENT_DISCONNECTED:
                is_disconnected = is_disconnected or self._has_shaken_hands
        return is_disconnected

    def _send(self, message: ClientMessage) -> None:
        if self._socket is not None:  # if it is None, `_reopen` tries again
            self._socket.send(encode_client_message(message), zmq.DONTWAIT)

    def _reopen(self, now: float) -> None:
        """Open a new connection. If that fails, for example without a free descriptor, try again later, until the
        timeout for a lost engine."""
        try:
            self._open(now)
        except zmq.ZMQError:
            self._close_sockets()
            self._protocol.greet(now)
            self._protocol.needs_reconnect = True

    def _open(self, now: float) -> None:
        """Connect a new socket and send Hello. Messages that are queued on the old socket, for a lost peer, are
        dropped."""
        self._close_sockets()
        self._opened_at = now
        socket = self._socket = new_socket(
            self._context, zmq.DEALER, identity=self._identity, max_message_bytes=MAX_CLIENT_MESSAGE_BYTES
        )
        if self._keys is not None:
            self._keys.secure_client(socket)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor = socket.get_monitor_socket(_MONITORED, f"inproc://monitor-{next(self._query_ids)}")
        self._make_poller()
        self._has_shaken_hands = False
        socket.connect(self.addresses[self._place])
        self._protocol.greet(now)

    def _close_sockets(self) -> None:
        if self._socket is not None:
            if self._monitor is not None:
                # In this order: an unread event would block ZeroMQ's thread, and so disable_monitor, forever.
                self._socket.disable_monitor()
                self._monitor.close(linger=0)
            self._socket.close(linger=0)
        self._socket = self._monitor = None
        self._make_poller()

    def _make_poller(self) -> None:
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        for socket in (self._socket, self._monitor):
            if socket is not None:
                self._poller.register(socket, zmq.POLLIN)


def _check_addresses(given: Any) -> list[str]:
    addresses: list[str] = list(given) if isinstance(given, list | tuple) else [given]
    if not addresses:
        raise ConfigError("no address is given: give those that engine-launch prints")
    for address in addresses:
        if not isinstance(address, str) or not address.startswith(("ipc://", "tcp://")):
            hint = "as engine-launch prints it"
            if str(address).startswith(("http://", "https://")):
                hint += "; clients of OpenAI's API take this one"
            raise ConfigError(f"address {address!r} must begin with ipc:// or tcp://, {hint}")
    return addresses
