"""Subscribers of KV events get every batch in order; those that they have missed are repeated, the last 10,000."""

from __future__ import annotations

import random
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tokenloom.core.kv.events import BlockContent, KVEvents
from tokenloom.core.links.event_port import NUM_KEPT, EventPort
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.sockets.keys import Keys
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.tier_places import replay_address

DEADLINE_S = 20.0


class Subscriber:
    """Reads both sockets by vLLM's wire form."""

    def __init__(self, context: zmq.Context[Any], address: str, keys: Keys | None = None) -> None:
        self.stream, self.replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.stream.setsockopt(zmq.SUBSCRIBE, b"")
        self.replay.setsockopt(zmq.RCVHWM, 0)
        for socket, place in ((self.stream, address), (self.replay, replay_address(address))):
            if keys is not None:
                keys.secure_client(socket)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(place)

    def read(self) -> Iterator[tuple[int, Any]]:
        while self.stream.poll(0):
            topic, number, batch = self.stream.recv_multipart()
            assert topic == b""
            yield struct.unpack(">Q", number)[0], msgspec.msgpack.decode(batch)


class Rig:
    """A port, a context and the number of batches that were made."""

    def __init__(self, address: str, **options: Any) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.address = address
        self.events = KVEvents(4, [])
        self.port = EventPort(self.context, EngineConfig(kv_events=address, **options), self.events.take)
        self.port.turn()
        self.num_made = 1  # AllBlocksCleared
        self.subscribers: list[Subscriber] = []  # open until the context ends

    def make(self) -> None:
        """Publish a batch with its number as the token."""
        key = self.num_made.to_bytes(32, "big")
        self.events.describe(key, BlockContent(None, struct.pack("<4i", *[self.num_made] * 4), None, None))
        self.events.written(0, 1, key)
        self.num_made += 1
        self.port.turn()

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline
            zmq.select([*self.port.wakers], [], [], 0.01)
            self.port.turn()

    def subscribe(self, **options: Any) -> Subscriber:
        """Return a subscriber that is connected: it has got a batch."""
        subscriber = Subscriber(self.context, self.address, **options)
        self.subscribers.append(subscriber)

        def has_come() -> bool:
            self.make()
            return bool(subscriber.stream.poll(10))

        self.until(has_come)
        list(subscriber.read())
        return subscriber

    def repeated(self, subscriber: Subscriber, first: int) -> list[tuple[int, Any]]:
        subscriber.replay.send_multipart([b"", struct.pack(">Q", first)])
        found: list[tuple[int, Any]] = []

        def is_whole() -> bool:
            while subscriber.replay.poll(0):
                empty, number, batch = subscriber.replay.recv_multipart()
                assert empty == b""
                if number == b"\xff" * 8:
                    assert batch == b""
                    return True
                found.append((struct.unpack(">Q", number)[0], msgspec.msgpack.decode(batch)))
            return False

        self.until(is_whole)
        return found


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(f"ipc://{tmp_path}/events")
    yield rig
    rig.context.destroy(linger=0)


def check(batches: list[tuple[int, Any]], first: int, last: int) -> None:
    """Check that these are the batches [first, last), each with its own token."""
    assert [number for number, _ in batches] == list(range(first, last))
    for number, (seconds, events, rank) in batches:
        assert abs(time.time() - seconds) < 600 and rank == 0
        (event,) = events
        assert event == {"type": "AllBlocksCleared"} if number == 0 else event["token_ids"] == [number] * 4


def test_every_batch_comes_in_order_and_missed_ones_are_repeated(rig: Rig) -> None:
    subscriber, rng = rig.subscribe(), random.Random(1)
    start, known = rig.num_made, dict[int, Any]()
    for _ in range(700):
        rig.make()
    rig.until(lambda: bool(subscriber.stream.poll(0)))
    deadline = time.monotonic() + DEADLINE_S
    last = start - 1
    while last < rig.num_made - 1:
        assert time.monotonic() < deadline
        for number, batch in subscriber.read():
            last = number
            if rng.random() < 0.5:  # the network loses the others
                known[number] = batch
    missing = min(set(range(start, rig.num_made)) - known.keys())
    repeated = rig.repeated(subscriber, missing)
    check(repeated, missing, rig.num_made)
    check(sorted((known | dict(repeated)).items()), start, rig.num_made)
    check(rig.repeated(subscriber, 0), 0, rig.num_made)
    assert rig.repeated(subscriber, rig.num_made) == []


def test_the_last_batches_are_kept_and_no_more(rig: Rig) -> None:
    subscriber = rig.subscribe()
    subscriber.stream.close()
    while rig.num_made < NUM_KEPT + 50:
        rig.make()
    check(rig.repeated(subscriber, 0), 50, rig.num_made)


def test_a_subscriber_that_is_gone_or_writes_nonsense_disturbs_nobody(rig: Rig) -> None:
    gone, other = rig.subscribe(), rig.subscribe()
    gone.replay.send_multipart([b"", struct.pack(">Q", 0)])
    gone.replay.close()
    other.replay.send_multipart([b"", b"x" * 50])
    other.replay.send(b"")
    rig.make()
    found = rig.repeated(other, rig.num_made - 1)
    assert [number for number, _ in found][-1:] in ([], [rig.num_made - 1])


def test_a_tcp_address_admits_only_the_key_of_the_file(tmp_path: Path) -> None:
    Keys.generate().save(tmp_path / "keys")
    with zmq.Context() as context, context.socket(zmq.REP) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1", min_port=20000, max_port=29000)
    rig = Rig(f"tcp://127.0.0.1:{port}", key_file=str(tmp_path / "keys"))
    try:
        stranger = Subscriber(rig.context, rig.address)
        friend = rig.subscribe(keys=Keys.load(tmp_path / "keys"))
        check(rig.repeated(friend, 0), 0, rig.num_made)
        assert not stranger.stream.poll(0) and not stranger.replay.poll(0)
    finally:
        rig.context.destroy(linger=0)


@pytest.mark.parametrize(
    ("address", "options"),
    [
        ("tcp://0.0.0.0:5557", {}),
        ("tcp://*:5557", {}),
        ("tcp://127.0.0.1:65535", {"insecure": True}),
        ("inproc://events", {"insecure": True}),
        ("5557", {"insecure": True}),
    ],
)
def test_an_address_that_admits_anyone_or_is_none_is_refused(address: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--kv-events"):
        EngineConfig(kv_events=address, **options)


def test_addresses_with_a_key_or_on_this_machine_are_accepted(tmp_path: Path) -> None:
    EngineConfig(kv_events="tcp://*:5557", insecure=True)
    EngineConfig(kv_events="tcp://10.0.0.1:5557", key_file="keys")
    EngineConfig(kv_events="tcp://127.0.0.1:5557")
    EngineConfig(kv_events=f"ipc://{tmp_path}/events")
    assert replay_address("tcp://*:5557") == "tcp://*:5558"


def test_its_sockets_are_for_this_user_alone_unless_the_mode_says_otherwise(tmp_path: Path) -> None:
    for mode in ("600", "660"):
        rig = Rig(f"ipc://{tmp_path}/events", listen_mode=mode)
        try:
            for name in ("events", "events-replay"):
                assert stat.S_IMODE((tmp_path / name).stat().st_mode) == int(mode, 8)
        finally:
            rig.context.destroy(linger=0)


@pytest.mark.parametrize("name", ["events", "events-replay"])
def test_it_replaces_no_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    context: zmq.Context[Any] = zmq.Context()
    try:
        with pytest.raises(ConfigError, match="there is a file"):
            EventPort(context, EngineConfig(kv_events=f"ipc://{tmp_path}/events"), list)
    finally:
        context.destroy(linger=0)
    assert (tmp_path / name).read_text() == "precious"
