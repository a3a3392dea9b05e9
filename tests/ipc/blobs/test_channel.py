"""Two processes with separate folders exchange a blob over ZeroMQ sockets, also if peers die and replies are lost."""

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
from tokenloom.ipc.sockets import new_socket
from tokenloom.tests.ipc.blobs import child

DATA = random.Random(8).randbytes(400_000)
CHUNK = 4096
DEADLINE_S = 30.0
SERVE = """
import os, random, time, zmq
from tokenloom.ipc.blobs.channel import BlobServer
from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.sockets import new_socket

class LossyServer(BlobServer):
    num_replies, loss, rng = int(sys.argv[3]), float(sys.argv[4]), random.Random(1)

    def reply(self, request, now):
        if self.num_replies == 0:
            os.kill(os.getpid(), 9)
        self.num_replies -= 1
        if self.rng.random() < self.loss:
            raise ProtocolError("lost")
        return super().reply(request, now)

server = LossyServer(BlobStore(Path(sys.argv[1]), 1 << 20))
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
            socket.poll(max(0.0, min(fetch.deadline - time.monotonic(), 0.02)) * 1000)


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
        with child.started(SERVE, tmp_path / name, address, num_replies, 0.0) as process:
            with new_socket(context, zmq.DEALER) as socket:
                socket.connect(address)
                fetch.resume()
                fetch_from(process, socket, fetch)
            assert (fetch.state is FetchState.DONE) == (name == "two")
            if name == "one":
                assert process.wait(timeout=DEADLINE_S) == -9
    assert store.open(fetch.digest) == DATA
    store.unpin(fetch.digest, "test")


def fetch_from_server(context: zmq.Context[zmq.Socket[bytes]], folder: Path, loss: float, fetch: BlobFetch) -> None:
    """Run `fetch` to its end against a process that serves `folder`/there and loses the share `loss` of its replies."""
    address = f"ipc://{folder}/s"
    with (
        child.started(SERVE, folder / "there", address, -1, loss) as process,
        new_socket(context, zmq.DEALER) as socket,
    ):
        socket.connect(address)
        fetch_from(process, socket, fetch)


def test_lost_replies_are_requested_again(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    digest = BlobStore(tmp_path / "there", 1 << 20).put(DATA)
    store = BlobStore(tmp_path / "here", 1 << 20)
    fetch = BlobFetch(store, digest)
    fetch.chunk_bytes, fetch.retry_s = CHUNK, 0.01
    fetch_from_server(context, tmp_path, 0.1, fetch)
    assert fetch.state is FetchState.DONE and store.open(digest) == DATA


def test_a_blob_that_no_peer_has_is_missing(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    fetch = BlobFetch(BlobStore(tmp_path / "here", 1 << 20), bytes(32))
    fetch_from_server(context, tmp_path, 0.0, fetch)
    assert fetch.state is FetchState.MISSING and not (tmp_path / "here").exists()


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
