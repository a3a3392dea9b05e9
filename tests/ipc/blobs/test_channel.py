"""Two processes with separate folders exchange a blob over ZeroMQ sockets, also if peers die."""

from __future__ import annotations

import hashlib
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tokenloom.ipc.blobs.channel import BlobServer, exchange
from tokenloom.ipc.blobs.fetch import BlobFetch, FetchState
from tokenloom.ipc.blobs.store import BlobStore
from tokenloom.ipc.codec import encode
from tokenloom.ipc.messages.blobs import MAX_CHUNKS_IN_FLIGHT, GetBlob
from tokenloom.ipc.sockets.zmq_sockets import new_socket
from tokenloom.tests.ipc.blobs import child

DATA = random.Random(8).randbytes(400_000)
CHUNK = 4096
DEADLINE_S = 30.0
SERVE = """
import os, time, zmq
from tokenloom.ipc.blobs.channel import BlobServer
from tokenloom.ipc.sockets.zmq_sockets import new_socket

class MortalServer(BlobServer):
    num_replies = int(sys.argv[3])

    def reply(self, request, now):
        if self.num_replies == 0:
            os.kill(os.getpid(), 9)
        self.num_replies -= 1
        return super().reply(request, now)

server = MortalServer(BlobStore(Path(sys.argv[1]), 1 << 20))
socket = new_socket(zmq.Context(), zmq.ROUTER)
socket.bind(sys.argv[2])
print("ready", flush=True)
while socket.poll(30_000):
    server.answer(socket, time.monotonic())
"""


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


def fetch_from(process: subprocess.Popen[str], socket: zmq.Socket[bytes], fetch: BlobFetch) -> None:
    """Run a fetch until it or its peer has ended."""
    end = time.monotonic() + DEADLINE_S
    while fetch.state is FetchState.FETCHING and process.poll() is None:
        assert time.monotonic() < end
        exchange(socket, {fetch.digest: fetch}, time.monotonic())
        if fetch.state is FetchState.FETCHING:
            socket.poll(int(max(0.0, min(fetch.deadline - time.monotonic(), 0.02)) * 1000))


def test_a_fetch_survives_the_deaths_of_its_peers(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    store = BlobStore(tmp_path / "here", 1 << 20)
    fetch = BlobFetch(store, hashlib.sha256(DATA).digest(), user="test")
    fetch.chunk_bytes = CHUNK
    num_chunks = -(-len(DATA) // CHUNK)
    num_replies = num_chunks // 2 + MAX_CHUNKS_IN_FLIGHT + 1  # of each of two peers: fewer than the blob has
    assert num_replies < num_chunks
    for name in ("one", "two"):
        BlobStore(tmp_path / name, 1 << 20).put(DATA)
        address = f"ipc://{tmp_path}/{name}.sock"
        with child.started(SERVE, tmp_path / name, address, num_replies) as process:
            with new_socket(context, zmq.DEALER) as socket:
                socket.connect(address)
                fetch.resume()
                fetch_from(process, socket, fetch)
            assert (fetch.state is FetchState.DONE) == (name == "two")
            if name == "one":
                assert process.wait(timeout=DEADLINE_S) == -9
    assert store.open(fetch.digest) == DATA
    store.unpin(fetch.digest, "test")


def test_malformed_frames_are_counted_and_not_answered(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    store = BlobStore(tmp_path / "there", 1 << 20)
    server, digest = BlobServer(store), store.put(b"abc")
    with new_socket(context, zmq.ROUTER) as router, new_socket(context, zmq.DEALER) as dealer:
        router.bind(f"ipc://{tmp_path}/s")
        dealer.connect(f"ipc://{tmp_path}/s")
        for frame in (b"", b"\xc1", b"\x81", encode(GetBlob(digest=digest, offset=0, length=3))):
            dealer.send(frame)
        end = time.monotonic() + DEADLINE_S
        while not dealer.poll(0) and time.monotonic() < end:
            router.poll(100)
            server.answer(router, 0.0)
        assert server.num_malformed == 3
        fetch = BlobFetch(BlobStore(tmp_path / "here", 1 << 20), digest)
        fetch.requests(0.0)
        exchange(dealer, {digest: fetch}, 0.0)
        assert fetch.state is FetchState.DONE
