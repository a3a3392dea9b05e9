"""EventPort: publishes KV events to any number of subscribers, and repeats the last batches to those that ask for them.

    PUB:    [topic "", number u64 big-endian, msgpack of [unix seconds, [events], replica]]
    ROUTER: ["", first number u64 big-endian] → ["", number, msgpack] …, then ["", 2^64 - 1, ""]      vLLM's form

The address of the ROUTER is the PUB's with the next port (tcp), or with -replay after the path (ipc). Each replica has
its own addresses. Batches are numbered from 0 in each core; the first event of a core is AllBlocksCleared.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from ...ipc.errors import ConfigError
from ...ipc.sockets.addresses import check_ipc_address
from ...ipc.sockets.client_auth import DOMAIN, ZapHandler
from ...ipc.sockets.door import Door
from ...ipc.sockets.keys import Keys
from ...ipc.sockets.zmq_sockets import bind, new_socket, receive
from ...ipc.spec.config.engine_config import EngineConfig
from ...ipc.spec.config.tier_places import events_address_of, replay_address

NUM_KEPT = 10_000  # number of the last batches that can be repeated
MAX_UNSENT = 100_000  # batches queued for a slow subscriber; it misses further ones and must ask for them
REPLAYS_PER_TURN = 256  # most batches repeated in one turn, so that a subscriber does not delay steps
_END = (2**64 - 1).to_bytes(8, "big")  # number that ends a replay


class EventPort:
    """Owner of both sockets and of the last batches."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: EngineConfig,
        take: Callable[[], Sequence[object]],
        zap: ZapHandler | None = None,
        replica: int = 0,
    ) -> None:
        """Bind both sockets. take: returns the events since its last call. zap: the context's ZapHandler, if it has
        one. ConfigError if an address is invalid or cannot be bound, or the key file cannot be read."""
        assert config.kv_events is not None
        self._take, self._replica = take, replica
        self._encoder = msgspec.msgpack.Encoder()
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=NUM_KEPT)
        self._replays: deque[tuple[bytes, int]] = deque()  # (subscriber, number of the next batch for it)
        self._zap: ZapHandler | None = None
        address = events_address_of(config.kv_events, replica)
        addresses = (address, replay_address(address))
        for each in addresses if address.startswith("ipc://") else ():
            check_ipc_address(each, "--kv-events")
        self._publisher, self._replayer = new_socket(context, zmq.PUB), new_socket(context, zmq.ROUTER)
        self._publisher.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        self._replayer.setsockopt(zmq.SNDHWM, 4 * REPLAYS_PER_TURN)
        if config.key_file is not None and address.startswith("tcp://"):
            keys = Keys.load(config.key_file)
            keys.secure_server(self._publisher, DOMAIN)
            keys.secure_server(self._replayer, DOMAIN)
            self._zap = zap or ZapHandler(context, keys.client_public)
            self._zap.admit(DOMAIN, keys.client_public)
        self._doors: list[Door | None] = []
        for socket, address in zip((self._publisher, self._replayer), addresses, strict=True):
            try:
                self._doors.append(bind(socket, address, int(config.listen_mode, 8)))
            except (zmq.ZMQError, OSError) as error:
                raise ConfigError(f"cannot bind {address} for --kv-events: {error}: give another address") from None

    def close(self) -> None:
        """Accept no more connections. The sockets are closed with their context."""
        for door in self._doors:
            if door is not None:
                door.close()

    @property
    def wakers(self) -> list[zmq.Socket[bytes]]:
        return [self._replayer] if self._zap is None else [self._replayer, self._zap.socket]

    @property
    def has_replays(self) -> bool:
        return bool(self._replays)

    def turn(self) -> None:
        """Publish new events, and send some of the batches that subscribers have asked for again."""
        if self._zap is not None:
            self._zap.answer()
        if events := self._take():
            batch = self._encoder.encode([time.time(), events, self._replica])
            self._publisher.send_multipart([b"", self._number.to_bytes(8, "big"), batch])
            self._kept.append((self._number, batch))
            self._number += 1
        for identity, first in receive(self._replayer, 2):
            self._replays.append((identity, int.from_bytes(first[:8], "big")))
        if self._replays:
            self._repeat()

    def _repeat(self) -> None:
        """Send up to REPLAYS_PER_TURN batches to the subscriber that has waited longest."""
        identity, first = self._replays.popleft()
        oldest = self._number - len(self._kept)
        start = max(first, oldest) - oldest
        batches = [self._kept[place] for place in range(start, min(start + REPLAYS_PER_TURN, len(self._kept)))]
        is_last = start + len(batches) >= len(self._kept)
        try:
            for number, batch in batches:
                self._replayer.send_multipart([identity, b"", number.to_bytes(8, "big"), batch], zmq.NOBLOCK)
            if is_last:
                self._replayer.send_multipart([identity, b"", _END, b""], zmq.NOBLOCK)
            else:
                self._replays.append((identity, batches[-1][0] + 1))
        except zmq.ZMQError:
            return  # the subscriber is gone or does not read; it may ask again
