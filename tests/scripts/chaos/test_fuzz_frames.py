"""Short run of scripts/chaos/fuzz_frames.py: frames of every channel, for handlers and for a socket."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import zmq

from tokenloom.ipc.codec import Decoder
from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.sockets.zmq_sockets import new_socket

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "chaos" / "fuzz_frames.py"
DEADLINE_S = 30.0


def decode(decoder: Decoder[object], frame: bytes) -> object:
    """Decode a frame; None if it is malformed."""
    try:
        return decoder.decode(frame)
    except ProtocolError:
        return None


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("fuzz_frames", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_frames"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fuzz_frames"]


def test_the_frontend_serves_after_thousands_of_malformed_frames(script: ModuleType) -> None:
    counts = script.send_to_frontend(10000, seed=7)
    assert counts["malformed_client_frames"] > 4000 and counts["malformed_core_frames"] > 0
    assert counts["requests"] > 10, "some frames must get as far as a request"


def test_a_supervisor_holds_connections_after_malformed_packets_and_leaves_no_descriptor(script: ModuleType) -> None:
    assert 1 < script.send_to_keeper(3000, seed=7) < 300


CHANNELS = ("client", "core", "results", "control", "frontend", "workers", "child")


@pytest.mark.parametrize("name", CHANNELS)
def test_decoding_raises_nothing_but_protocol_errors(script: ModuleType, name: str) -> None:
    assert sorted(script.CHANNELS) == sorted(CHANNELS)
    channel = script.CHANNELS[name]
    fuzzer, decoder = script.FrameFuzzer(channel.message_type, 3), Decoder[object](channel.message_type)
    num_good = sum(decode(decoder, fuzzer.mutated()) is not None for _ in range(3000))
    assert 100 < num_good < 2000


@pytest.mark.parametrize("name", CHANNELS)
def test_every_message_type_of_a_channel_is_generated(script: ModuleType, name: str) -> None:
    channel = script.CHANNELS[name]
    fuzzer, decoder = script.FrameFuzzer(channel.message_type, 4), Decoder[object](channel.message_type)
    frames = [fuzzer.valid() for _ in range(2000)]
    assert all(isinstance(msgspec.msgpack.decode(frame), dict) for frame in frames)
    seen = {type(decode(decoder, frame)) for frame in frames}
    assert seen - {type(None)} == set(channel.message_type.__args__)


def test_malformed_frames_never_decode_and_the_seed_fixes_them(script: ModuleType) -> None:
    message_type = script.CHANNELS["core"].message_type
    decoder = Decoder[object](message_type)
    for seed in range(3):
        frames = [script.FrameFuzzer(message_type, seed).malformed() for _ in range(2)]
        assert frames[0] == frames[1]
        with pytest.raises(ProtocolError):
            decoder.decode(frames[0])


def test_frames_reach_a_socket_and_a_dead_one_is_detected(script: ModuleType) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = new_socket(context, zmq.ROUTER)
    server.bind("tcp://127.0.0.1:*")
    address = server.getsockopt_string(zmq.LAST_ENDPOINT)
    fuzzer = script.FrameFuzzer(script.CHANNELS["client"].message_type, 0)
    thrower = threading.Thread(
        target=script.send_to_socket,
        args=(address, script.CHANNELS["client"], iter(fuzzer.mutated, None), 500),
        daemon=True,
    )
    thrower.start()
    num_seen = 0
    while num_seen < 500 and server.poll(int(DEADLINE_S * 1000)):
        server.recv_multipart()
        num_seen += 1
    thrower.join(DEADLINE_S)
    assert num_seen == 500 and not thrower.is_alive()
    with pytest.raises(SystemExit, match="does not answer"):
        script.check_alive(address, deadline_s=0.2)
    context.destroy(linger=0)
