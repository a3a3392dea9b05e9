"""Send malformed frames to an engine and check that it still serves.

    python scripts/chaos/fuzz_frames.py                            100,000 frames at a Frontend in this process
    python scripts/chaos/fuzz_frames.py ADDRESS                    100,000 at the client socket of a running engine
    python scripts/chaos/fuzz_frames.py ADDRESS --channel core     … at core.sock in its run directory
    python scripts/chaos/fuzz_frames.py ADDRESS --channel results  … at results-0.sock there; likewise control
    python scripts/chaos/fuzz_frames.py --channel keeper           100,000 packets at a supervisor's kept connections

Frames are valid messages of the channel with a mutation: bits, lengths, types, fields, nesting. The messages are
generated from their definitions in ipc/messages, so that a new one is fuzzed without a change here. The same seed gives
the same frames.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq
from msgspec import inspect

from tokenloom.frontend.launcher.supervisor.frontends.kept_connections import KeptConnections
from tokenloom.frontend.listening.http_listeners import HttpListeners
from tokenloom.frontend.listening.keeper import CLOSED, MAX_FDS, MAX_PACKET_BYTES, NEW, REPORT, packet, parse
from tokenloom.ipc.codec import Decoder, encode
from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.messages.base import PROTOCOL_VERSION, Hello, Refused
from tokenloom.ipc.messages.client import ClientMessage, FrontendMessage, GetHealth, Health
from tokenloom.ipc.messages.core import CoreToFrontend, FrontendToCore
from tokenloom.ipc.messages.supervisor import ChildToSupervisor, SupervisorToChild
from tokenloom.ipc.messages.workers import CoreToWorker, WorkerToCore
from tokenloom.ipc.sockets.zmq_sockets import new_socket
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.scripts.bench.engine_steps import new_frontend, new_spec


class Channel(NamedTuple):
    """A fuzzing target: the type of its messages, and the kind of socket that sends them."""

    message_type: object
    socket_kind: int


CHANNELS = {
    "client": Channel(ClientMessage, zmq.DEALER),
    "core": Channel(FrontendToCore, zmq.DEALER),
    "results": Channel(WorkerToCore, zmq.PUSH),
    "control": Channel(ChildToSupervisor, zmq.DEALER),
    "frontend": Channel(CoreToFrontend, zmq.DEALER),
    "workers": Channel(CoreToWorker, zmq.PUB),
    "child": Channel(SupervisorToChild, zmq.DEALER),
}
DEADLINE_S = 30.0


class FrameFuzzer:
    """Generates the frames of one channel from a seed."""

    def __init__(self, message_type: object, seed: int) -> None:
        self._random = random.Random(seed)
        info = inspect.type_info(message_type)
        members = info.types if isinstance(info, inspect.UnionType) else [info]
        self._structs = [each for each in members if isinstance(each, inspect.StructType)]
        self._decoder: Decoder[object] = Decoder(message_type)

    def valid(self) -> bytes:
        """Return a message with random values, including values that a validator refuses."""
        return msgspec.msgpack.encode(self._raw(self._random.choice(self._structs), 0))

    def mutated(self) -> bytes:
        """Return a message with a mutation, which may still decode."""
        return self._random.choice(_MUTATIONS)(self._random, self.valid(), self.valid())

    def malformed(self) -> bytes:
        """Return a frame that certainly does not decode, for sockets that trust their peers' values."""
        while True:
            frame = self.mutated()
            try:
                self._decoder.decode(frame)
            except ProtocolError:
                return frame

    def _raw(self, info: inspect.Type, depth: int) -> Any:
        """Return a random value of a type, in msgpack's own types."""
        pick = self._random
        if isinstance(info, inspect.StructType) and info.array_like:
            return [self._raw(field.type, depth + 1) for field in info.fields]
        if isinstance(info, inspect.StructType):
            share = pick.choice([0.0, 0.0, 0.1, 0.5])  # of the optional fields: if few are set, more messages are valid
            given = [field for field in info.fields if field.required or pick.random() < share]
            fields = {field.encode_name: self._raw(field.type, depth + 1) for field in given}
            return {info.tag_field: info.tag, **fields} if info.tag_field else fields
        if isinstance(info, inspect.UnionType):
            return self._raw(pick.choice(info.types), depth)
        if isinstance(info, inspect.ListType | inspect.VarTupleType):
            return [self._raw(info.item_type, depth + 1) for _ in range(pick.randrange(4))]
        if isinstance(info, inspect.DictType):
            return {self._raw(info.key_type, depth + 1): self._raw(info.value_type, depth + 1)}
        if isinstance(info, inspect.LiteralType):
            return pick.choice(list(info.values))
        makers: dict[type[inspect.Type], Callable[[], object]] = {
            inspect.IntType: lambda: pick.choice([0, 1, 2, -1, 7, 2**31, 2**63, pick.getrandbits(16)]),
            inspect.FloatType: lambda: pick.choice([0.0, 0.5, 1.0, -1.0, float("nan"), float("inf"), 1e300]),
            inspect.StrType: lambda: pick.choice(["", "r", "x" * 300, "The capital", "\x00", "漢\ufffd"]),
            inspect.BytesType: self._bytes,
            inspect.MemoryViewType: self._bytes,
            inspect.BoolType: lambda: pick.random() < 0.5,
        }
        maker = makers.get(type(info))
        return None if maker is None else maker()

    def _bytes(self) -> bytes:
        pick = self._random
        return pick.choice([b"", b"abc", b"\0\0\0\0", b"\1\0\0\0\2\0\0\0", pick.randbytes(64)])


# ── mutations: (random, frame, another frame) → frame ────────────────────────────────────────────────────────────────


def _flip(pick: random.Random, frame: bytes, _: bytes) -> bytes:
    data = bytearray(frame)
    for _bit in range(pick.randrange(1, 4)):
        data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
    return bytes(data)


def _truncate(pick: random.Random, frame: bytes, _: bytes) -> bytes:
    return frame[: pick.randrange(len(frame))]


def _insert(pick: random.Random, frame: bytes, _: bytes) -> bytes:
    at = pick.randrange(len(frame) + 1)
    return frame[:at] + pick.randbytes(pick.randrange(1, 9)) + frame[at:]


def _splice(pick: random.Random, frame: bytes, other: bytes) -> bytes:
    return frame[: pick.randrange(len(frame) + 1)] + other[pick.randrange(len(other) + 1) :]


def _noise(pick: random.Random, frame: bytes, _: bytes) -> bytes:
    return pick.randbytes(pick.randrange(64))


def _inflate(pick: random.Random, frame: bytes, _: bytes) -> bytes:
    """Insert a header whose length exceeds the frame."""
    at = pick.randrange(len(frame))
    header = pick.choice([b"\xdb", b"\xdd", b"\xdf", b"\xc6", b"\xc9"]) + b"\xff" * 4
    return frame[:at] + header + frame[at + 1 :]


def _nest(pick: random.Random, frame: bytes, _: bytes) -> bytes:
    at = pick.randrange(len(frame))
    return frame[:at] + pick.choice([b"\x91", b"\x81\xa1x"]) * pick.randrange(1, 3000) + frame[at:]


def _retype(pick: random.Random, frame: bytes, _: bytes) -> bytes:
    """Replace a field by one of another type, remove it, or add an unknown field."""
    raw = msgspec.msgpack.decode(frame)
    strange = pick.choice([None, True, -1, 1.5, "x", b"\xff", [], {}, [[1]], {"type": "hello"}, 2**64 - 1])
    keys = list(raw)
    kind = pick.randrange(3)
    if kind == 0:
        del raw[pick.choice(keys)]
    elif kind == 1:
        raw[pick.choice(keys)] = strange
    else:
        raw[pick.choice(["", "x", "params", "token_ids"])] = strange
    return msgspec.msgpack.encode(raw)


def _as_it_is(pick: random.Random, frame: bytes, _: bytes) -> bytes:
    return frame


_MUTATIONS = (_flip, _truncate, _insert, _splice, _noise, _inflate, _nest, _retype, _as_it_is)
_PACKET_MUTATIONS = (_flip, _truncate, _insert, _splice, _noise, _as_it_is)


# ── targets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def send_to_frontend(count: int, seed: int) -> dict[str, int]:
    """Send `count` frames to the client and core handlers of a Frontend for the demo model; return its event counts.
    SystemExit if the frontend then does not answer a client."""
    frontend, _ = new_frontend(EngineConfig(max_model_len=64))
    from_clients = FrameFuzzer(ClientMessage, seed)
    from_core = FrameFuzzer(CoreToFrontend, seed + 1)
    core_decoder: Decoder[CoreToFrontend] = Decoder(CoreToFrontend)
    pick = random.Random(seed + 2)
    for number in range(count):
        if pick.random() < 0.2:
            try:
                message = core_decoder.decode(from_core.mutated())
            except ProtocolError:
                continue
            if not isinstance(message, Refused):  # a Refused ends a frontend by design
                frontend.on_core_message(message)
        else:
            frontend.on_client_frame(b"client %d" % pick.randrange(4), from_clients.mutated())
        if number % 16 == 0:
            frontend.on_wakeup()
            frontend.tick(time.monotonic())
            frontend.outbox.to_clients.clear()
            frontend.outbox.to_cores[0].clear()
    for last in (Hello(protocol_version=PROTOCOL_VERSION), GetHealth(query_id=1)):
        frontend.on_client_frame(b"last", encode(last))
    frontend.tick(time.monotonic())
    answers = [msgspec.msgpack.decode(frame) for identity, frame in frontend.outbox.to_clients if identity == b"last"]
    if [answer["type"] for answer in answers] != ["welcome", "health_is"]:
        raise SystemExit(f"the frontend does not serve any more: {answers}")
    return dict(frontend.counts)


def send_to_keeper(count: int, seed: int) -> int:
    """Send `count` packets about HTTP connections, with descriptors, to a supervisor's end of the channel in this
    process, which accepts connections meanwhile; return the number that it then holds. SystemExit if it does not hold a
    connection after that, or if descriptors are left behind."""
    config, pick, num_before = EngineConfig(http="127.0.0.1:0"), random.Random(seed), _num_descriptors()
    listeners = HttpListeners()
    listeners.open(config)
    kept = KeptConnections(new_spec(config), listeners, zmq.Poller())
    address, clients = listeners.sockets[0].getsockname(), list[socket.socket]()
    with _next_channel(kept) as channel, open(os.devnull, "rb") as null:
        for number in range(count):
            if number % (count // 50) == 0:
                clients.append(socket.create_connection(address))
            numbers = [pick.choice([0, 1, 2, 2**32 - 1, pick.getrandbits(6)]) for _ in range(pick.randrange(5))]
            whole = packet(pick.choice(b"NCRK"), numbers)
            data = pick.choice(_PACKET_MUTATIONS)(pick, whole, packet(CLOSED, numbers))
            socket.send_fds(channel, [data or b"?"], [null.fileno()] * pick.randrange(4))
            kept.go_on()
            _take_packets(channel)
    with _next_channel(kept) as channel:
        channel.send(packet(REPORT, [2**31]))
        kept.go_on()
        _take_packets(channel)  # from now on it gets new connections
        clients.append(socket.create_connection(address))
        kept.go_on()
        ((kind, numbers),) = _take_packets(channel)
    with _next_channel(kept) as channel:
        channel.send(packet(REPORT, [0]))
        kept.go_on()
        ((_, held),) = _take_packets(channel)
    if kind != NEW or not set(numbers) <= set(held):
        raise SystemExit(f"the supervisor does not hold connections any more: {numbers} of {held}")
    kept.close()
    listeners.close()
    for client in clients:
        client.close()
    if _num_descriptors() > num_before:
        raise SystemExit(f"{_num_descriptors() - num_before} descriptors are left behind")
    return len(held)


def _take_packets(channel: socket.socket) -> list[tuple[int, Sequence[int]]]:
    """Take all packets that wait, and close their descriptors."""
    found: list[tuple[int, Sequence[int]]] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            data, fds, _, _ = socket.recv_fds(channel, MAX_PACKET_BYTES, MAX_FDS)
            found.append(parse(data))
            for fd in fds:
                os.close(fd)
    return found


def _next_channel(kept: KeptConnections) -> socket.socket:
    """Hand the connections over to another frontend, and return its end of the channel."""
    _, channel_fd = kept.prepare(0)
    kept.hand_over(0)
    channel = socket.socket(fileno=os.dup(channel_fd))
    channel.setblocking(False)
    return channel


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def send_to_socket(address: str, channel: Channel, frames: Iterator[bytes], count: int) -> None:
    """Send `count` frames to a socket over a few connections, some frames in several parts."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [new_socket(context, channel.socket_kind) for _ in range(4)]
    try:
        for socket in sockets:
            socket.connect(address)
            socket.setsockopt(zmq.SNDHWM, 1000)
            socket.setsockopt(zmq.SNDTIMEO, int(DEADLINE_S * 1000))
            socket.setsockopt(zmq.LINGER, int(DEADLINE_S * 1000))
        for number in range(count):
            socket = sockets[number % len(sockets)]
            parts = [next(frames)] if number % 50 else [b"", next(frames), b"more"]
            socket.send_multipart(parts)
            while channel.socket_kind == zmq.DEALER and socket.poll(0):
                socket.recv_multipart()
    finally:
        context.destroy()


def check_alive(address: str, deadline_s: float = DEADLINE_S) -> Health:
    """Check that a new client gets a good health answer; raise SystemExit if none arrives by the deadline."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = new_socket(context, zmq.DEALER)
    decoder: Decoder[FrontendMessage] = Decoder(FrontendMessage)
    deadline = time.monotonic() + deadline_s
    try:
        socket.connect(address)
        socket.send(encode(Hello(protocol_version=PROTOCOL_VERSION)))
        socket.send(encode(GetHealth(query_id=1)))
        while socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            answer = decoder.decode(socket.recv())
            if isinstance(answer, Health):
                return answer
    finally:
        context.destroy(linger=0)
    raise SystemExit(f"{address} does not answer within {deadline_s:g} s")


def main(arguments: list[str]) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", nargs="?", help="where a running engine listens; none: a Frontend in this process")
    parser.add_argument(
        "--channel", choices=[*CHANNELS, "keeper"], default="client", help="the kind of socket at ADDRESS"
    )
    parser.add_argument("--alive", help="client address to ask afterwards, if ADDRESS is not that one")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    if options.channel == "keeper":
        print(send_to_keeper(options.count, options.seed), "connections held")
    elif options.address is None:
        print(send_to_frontend(options.count, options.seed))
    else:
        channel = CHANNELS[options.channel]
        fuzzer = FrameFuzzer(channel.message_type, options.seed)
        frame = fuzzer.mutated if options.channel == "client" else fuzzer.malformed
        send_to_socket(options.address, channel, iter(frame, None), options.count)
        alive = options.alive or (options.address if options.channel == "client" else None)
        if alive is not None:
            print(check_alive(alive))
    print(f"{options.count} frames in {time.monotonic() - begun:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
