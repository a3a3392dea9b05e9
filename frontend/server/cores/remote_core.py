"""RemoteCore: a gateway's connection to one core: the socket, the events of the connection, and the core's lease.

Each connection has a new socket, so that no message of an earlier connection is sent or read. The core is lost when the
connection ends or when it is silent for a lease, which is checked only after all received messages are read.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec
import zmq

from ....ipc.messages.base import LEASE_S, PING_INTERVAL_S, Ping, Refused
from ....ipc.messages.core import CoreToFrontend, FrontendToCore, GatewayWelcome, WeightsChanged
from ....ipc.messages.orders import Order, Ordered
from ....ipc.messages.progress_sum import add_up, totals_of
from ....ipc.messages.supervisor import CoreUp, Progress, ReplicaDown, WorkersUp
from ....ipc.sockets.channel import Channel
from ....ipc.sockets.keys import Keys
from ....ipc.sockets.zmq_sockets import new_socket

logger = logging.getLogger("tokenloom.gateway")

NO_PROGRESS = Progress(step=0, step_age_s=0.0, num_running=0, num_waiting=0)
RECONNECT_MS, MAX_RECONNECT_MS = 100, 1000  # to an engine that is not running, or refuses our key
MANY_FAILURES = 3  # failed handshakes in a row, after which the key is reported as the cause
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILURES
_monitors = itertools.count()

News: TypeAlias = CoreToFrontend | CoreUp


class RemoteCore:
    """One core of a gateway. `sizes`: the sizes of its pool once it has welcomed this frontend and may be used, else
    None. `is_catching_up`: it is loading the weights that the other cores have, before it is used."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        number: int,
        identity: bytes,
        keys: Keys,
        counts: Counter[str],
    ) -> None:
        """`number`: the core's place among the gateway's cores; `identity`: the name of this frontend for all cores."""
        self.address, self._number = address, number
        self._context, self._identity, self._keys, self._counts = context, identity, keys, counts
        self.sizes: GatewayWelcome | None = None
        self._welcome: GatewayWelcome | None = None  # of this connection, with the weights that the core has now
        self.is_catching_up = self.has_caught_up = False  # on this connection
        self._catch_up_id = ""  # of the order to load the other cores' weights
        self._last = self._before = NO_PROGRESS  # reports: the core's last one, and the totals of earlier connections
        self._is_open = False  # the handshake has succeeded
        self._heard_at = self._judged_at = self._pinged_at = 0.0  # monotonic seconds
        self._num_failures = 0  # consecutive handshakes that failed
        self._complaint = ""  # the last reason that was logged
        self._open()

    # ── the socket ───────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self) -> None:
        socket = new_socket(self._context, zmq.DEALER, identity=self._identity)
        self._keys.secure_client(socket)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        self._monitor = socket.get_monitor_socket(_MONITORED, f"inproc://core-monitor-{next(_monitors)}")
        self._channel: Channel[CoreToFrontend, FrontendToCore] = Channel(socket, CoreToFrontend, "core", self._counts)
        socket.connect(self.address)
        self._is_open, self._welcome = False, None
        self.is_catching_up = self.has_caught_up = False

    def close(self) -> None:
        self._channel.socket.disable_monitor()  # in this order: an unread event blocks ZeroMQ's thread for ever
        self._monitor.close(linger=0)
        self._channel.socket.close(linger=0)

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        return [self._channel.socket, self._monitor]

    # ── receive ──────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, now: float) -> Iterator[News]:
        """Yield the core's messages, except those handled here (Refused, and the reply to `catch_up`), CoreUp for each
        new connection, and ReplicaDown for the end of a connection."""
        for message in self._channel.receive():
            self._heard_at = now
            if isinstance(message, Refused):
                self.refuse(message.error.message)
            elif isinstance(message, GatewayWelcome):
                self.sizes = self._welcome = message
                yield message
            elif isinstance(message, WeightsChanged):
                if self._welcome is not None:
                    model = self._welcome.model.with_weights(message.weights)
                    self._welcome = msgspec.structs.replace(self._welcome, model=model)
                yield message
            elif isinstance(message, Ordered) and message.order_id == self._catch_up_id:
                yield from self._on_caught_up(message)
            elif isinstance(message, (ReplicaDown, WorkersUp)):
                yield msgspec.structs.replace(message, replica=self._number)
            elif isinstance(message, Progress):
                self._last = message
                yield message
            else:
                yield message
        yield from self._read_monitor(now)
        yield from self._judge(now)

    def _on_caught_up(self, done: Ordered) -> Iterator[News]:
        self.is_catching_up, self.has_caught_up = False, True
        if done.error is not None:
            self.refuse(f"it cannot read the weights of the others: {done.error.message}")
        elif self._welcome is not None:
            self.sizes = self._welcome
            yield self._welcome

    def catch_up(self, model_folder: str) -> None:
        """Let a core that has just welcomed this frontend load the weights in `model_folder` before it is used."""
        self.sizes, self.is_catching_up = None, True
        logger.info("the core at %s reads the weights in %s, as the others have", self.address, model_folder)
        self._catch_up_id = secrets.token_hex(8)
        self.send([Order(order_id=self._catch_up_id, action="reload", model=model_folder)])

    def _read_monitor(self, now: float) -> Iterator[News]:
        while self._monitor.poll(0):
            event = int.from_bytes(self._monitor.recv_multipart()[0][:2], "little")
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_failures = 0
                self._is_open, self._heard_at, self._judged_at, self._pinged_at = True, now, now, now
                yield CoreUp(core_epoch=0, replica=self._number)
            elif event & _FAILURES:
                self._num_failures += 1
                if self._num_failures < MANY_FAILURES:  # an engine that is starting or ending
                    continue
                self.complain("it does not take the key of --hosts-key-file, or is no --core-listen: check both")
            elif self._is_open:
                yield self._lose("the connection has ended")
                return

    def _judge(self, now: float) -> Iterator[News]:
        """Yield ReplicaDown if the core has been silent for a lease. The lease starts again if this loop itself was
        stopped."""
        if not self._is_open:
            return
        if now - self._judged_at > LEASE_S / 2:
            self._heard_at = now
        self._judged_at = now
        if self.is_used and now - self._heard_at > LEASE_S:
            yield self._lose(f"it has been silent for {LEASE_S:g} s")

    def _lose(self, reason: str) -> ReplicaDown:
        reason = f"the core at {self.address} is lost: {reason}"
        if self.is_used:
            logger.warning("%s", reason)
        self.sizes = None
        self._before, self._last = totals_of(add_up([self._before, self._last])), NO_PROGRESS
        self.close()
        self._open()
        return ReplicaDown(replica=self._number, reason=reason)

    def refuse(self, reason: str) -> None:
        """Log the reason, and do not use the core until it has a new connection."""
        self.sizes = None
        self.complain(reason)

    def complain(self, reason: str) -> None:
        """Log why the core cannot be used, unless the last such line had the same reason."""
        if reason != self._complaint:
            self._complaint = reason
            logger.error("the core at %s is not used: %s", self.address, reason)

    def on_used(self) -> None:
        """Log that the core is used for the gateway's model."""
        self._complaint = ""
        logger.info("the core at %s is used", self.address)

    @property
    def is_used(self) -> bool:
        """Whether the core has welcomed this frontend and may be used."""
        return self.sizes is not None

    @property
    def progress(self) -> Progress:
        """The core's last report, with the totals of earlier connections added."""
        return add_up([self._before, self._last])

    # ── send ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, messages: Sequence[FrontendToCore]) -> None:
        """Send messages. Without a connection they are dropped: a new connection starts with Hello and all open
        requests."""
        if self._is_open:
            with contextlib.suppress(zmq.Again):
                for message in messages:
                    self._channel.send(message)

    def ping(self, now: float) -> None:
        is_used = self.is_used or self.is_catching_up
        if is_used and now - self._pinged_at >= PING_INTERVAL_S:
            self._pinged_at = now
            self.send([Ping()])
