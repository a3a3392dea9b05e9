"""A fetch ends with the peer's bytes or leaves nothing, whatever the network and the peer do."""

from __future__ import annotations

import hashlib
import math
import random
from pathlib import Path

import pytest

from tokenloom.ipc.blobs.channel import LEASE_S, MAX_LEASES, BlobServer
from tokenloom.ipc.blobs.fetch import MAX_BACKOFF, BlobFetch, FetchState
from tokenloom.ipc.blobs.store import BlobStore
from tokenloom.ipc.errors import Overloaded
from tokenloom.ipc.messages.blobs import MAX_CHUNK_BYTES, MAX_CHUNKS_IN_FLIGHT, BlobChunk, BlobReply, GetBlob, NoBlob
from tokenloom.tests.support.today import seeds

CHUNK = 100
DATA = random.Random(3).randbytes(2050)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "here", 10_000)


@pytest.fixture
def peer(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "there", 10_000)


def new_fetch(store: BlobStore, digest: bytes) -> BlobFetch:
    fetch = BlobFetch(store, digest)
    fetch.chunk_bytes = CHUNK
    return fetch


@pytest.fixture
def fetch(store: BlobStore) -> BlobFetch:
    """The fetch of DATA."""
    return new_fetch(store, hashlib.sha256(DATA).digest())


def chunk(request: GetBlob, data: bytes = DATA) -> BlobChunk:
    part = data[request.offset : request.offset + request.length]
    return BlobChunk(digest=request.digest, offset=request.offset, size=len(data), data=part)


def files(store: BlobStore) -> list[str]:
    return [file.name for file in store.folder.files()]


@pytest.mark.parametrize("seed", seeds(4, 16))
def test_a_network_that_loses_repeats_and_reorders_delivers_the_bytes(
    store: BlobStore, peer: BlobStore, seed: int
) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(rng.choice([0, 1, CHUNK, 8 * CHUNK, 2999]))
    fetch, server = new_fetch(store, peer.put(data)), BlobServer(peer)
    now, wire = 0.0, list[GetBlob | BlobReply]()
    for _ in range(5000):
        asked = fetch.requests(now)
        wire += [each for each in asked for _ in range(rng.choice([0, 1, 1, 2]))]
        if not wire:
            now = max(now, fetch.deadline)
            continue
        message = wire.pop(rng.randrange(len(wire)))
        if isinstance(message, GetBlob):
            wire += [server.reply(message, now)] * rng.choice([0, 1, 1, 2])
        else:
            fetch.receive(message, now)
        if fetch.state is not FetchState.FETCHING:
            break
    assert fetch.state is FetchState.DONE and store.open(fetch.digest) == data
    assert fetch.requests(now) == [] and fetch.deadline == math.inf


def test_only_a_window_of_chunks_is_requested_and_only_the_lost_one_again(store: BlobStore, fetch: BlobFetch) -> None:
    (first,) = fetch.requests(0.0)
    assert (first.offset, first.length) == (0, CHUNK), "the size is not known yet"
    assert fetch.requests(0.0) == [] and fetch.deadline == BlobFetch.retry_s
    fetch.receive(chunk(first), 1.0)
    window = fetch.requests(1.0)
    assert [each.offset for each in window] == [CHUNK * i for i in range(1, 1 + MAX_CHUNKS_IN_FLIGHT)]
    for request in window[1:]:
        fetch.receive(chunk(request), 1.0)
    assert fetch.requests(1.0) == [], "chunks after a gap wait in memory, so no more are requested"
    assert store.folder.files()[0].size == len(DATA), "room is reserved once"
    now, waits = 1.0, []
    for _ in range(6):
        waits.append(fetch.deadline - now)
        now = fetch.deadline
        assert fetch.requests(now) == window[:1]
    assert waits == [BlobFetch.retry_s * 2**i for i in range(4)] + [BlobFetch.retry_s * MAX_BACKOFF] * 2
    fetch.receive(chunk(window[0]), now)
    assert len(fetch.requests(now)) == MAX_CHUNKS_IN_FLIGHT and fetch.deadline == now + BlobFetch.retry_s


def test_another_peer_continues_where_the_first_one_ended(store: BlobStore, fetch: BlobFetch) -> None:
    fetch.receive(chunk(*fetch.requests(0.0)), 0.0)
    window = fetch.requests(0.0)
    fetch.receive(chunk(window[0]), 0.0)
    fetch.receive(NoBlob(digest=fetch.digest), 0.0)
    assert fetch.state is FetchState.MISSING and fetch.requests(9.0) == []
    fetch.resume()
    assert fetch.requests(9.0)[0] == window[1]
    fetch.resume()  # that one was lost without a word
    asked = fetch.requests(9.0)
    assert asked[0] == window[1]
    while fetch.state is FetchState.FETCHING:
        for request in asked:
            fetch.receive(chunk(request), 9.0)
        asked = fetch.requests(9.0)
    assert fetch.state is FetchState.DONE and store.open(fetch.digest) == DATA


def test_a_fetched_blob_is_pinned_for_its_user(store: BlobStore) -> None:
    fetch = BlobFetch(store, hashlib.sha256(DATA).digest(), user="request 7")
    fetch.receive(chunk(*fetch.requests(0.0)), 0.0)
    with pytest.raises(Overloaded):
        store.put(bytes(9000))
    store.unpin(fetch.digest, "request 7")
    store.put(bytes(9000))


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"data": b"x" * CHUNK}, "SHA-256"),
        ({"data": b"x" * (CHUNK - 1)}, "99 bytes at 0 of 2050, expected 100 of 2050"),
        ({"size": -1}, "expected -1 of -1"),
        ({"size": 1 << 62}, "exceeds the limit"),
        ({"size": 0}, "expected 0 of 0"),
        ({"size": 2051, "at": 300}, "100 bytes at 300 of 2051, expected 100 of 2050"),
    ],
)
def test_a_wrong_reply_ends_the_fetch_and_leaves_no_file(
    store: BlobStore, fetch: BlobFetch, changed: dict[str, object], error: str
) -> None:
    at = changed.pop("at", 0)
    while fetch.state is FetchState.FETCHING:
        for request in fetch.requests(0.0):
            good = chunk(request)
            fields = {name: getattr(good, name) for name in good.__struct_fields__}
            fetch.receive(BlobChunk(**(fields | (changed if request.offset == at else {}))), 0.0)
    assert fetch.state is FetchState.FAILED and error in fetch.error
    assert files(store) == [] and fetch.requests(100.0) == []


def test_a_fetch_without_room_ends_with_the_numbers_and_leaves_no_file(store: BlobStore, fetch: BlobFetch) -> None:
    store.put(bytes(9000), "a request")
    fetch.receive(chunk(*fetch.requests(0.0)), 0.0)
    assert fetch.state is FetchState.FAILED and "no room for 2050 bytes" in fetch.error
    assert len(files(store)) == 1


def test_a_cancelled_fetch_removes_its_file_and_ignores_late_replies(store: BlobStore, fetch: BlobFetch) -> None:
    fetch.receive(chunk(*fetch.requests(0.0)), 0.0)
    (request, *_) = fetch.requests(0.0)
    assert len(files(store)) == 1
    fetch.cancel()
    fetch.cancel()
    assert fetch.state is FetchState.FAILED and files(store) == []
    fetch.receive(chunk(request), 0.0)
    assert fetch.requests(9.0) == [] and files(store) == []


def test_a_blob_that_another_process_put_meanwhile_is_kept(store: BlobStore) -> None:
    fetch = new_fetch(store, hashlib.sha256(DATA[:150]).digest())
    fetch.receive(chunk(*fetch.requests(0.0), DATA[:150]), 0.0)
    other = BlobStore(store.folder.path, 10_000)
    held = other.open(other.put(DATA[:150]))
    fetch.receive(chunk(*fetch.requests(0.0), DATA[:150]), 0.0)
    assert fetch.state is FetchState.DONE and files(store) == [fetch.digest.hex()]
    assert held == store.open(fetch.digest)


def test_a_server_never_sends_damaged_or_unbounded_parts(peer: BlobStore) -> None:
    server, digest = BlobServer(peer), peer.put(bytes(1000))
    for offset, length in [(1001, 1), (-1, 1), (1 << 70, 1)]:
        assert server.reply(GetBlob(digest=digest, offset=offset, length=length), 0.0) == NoBlob(digest=digest)
    for offset, length, expected in [(990, 100, 10), (0, -5, 0), (1000, 1, 0), (0, 1 << 70, 1000)]:
        reply = server.reply(GetBlob(digest=digest, offset=offset, length=length), 0.0)
        assert isinstance(reply, BlobChunk) and len(reply.data) == expected
    large = BlobStore(peer.folder.path, 1 << 23)
    reply = BlobServer(large).reply(GetBlob(digest=large.put(bytes(1 << 22)), offset=0, length=1 << 22), 0.0)
    assert isinstance(reply, BlobChunk) and len(reply.data) == MAX_CHUNK_BYTES
    (peer.folder.path / digest.hex()).write_bytes(b"damaged")
    reply = BlobServer(BlobStore(peer.folder.path, 10_000)).reply(GetBlob(digest=digest, offset=0, length=1), 0.0)
    assert reply == NoBlob(digest=digest)


def test_a_blob_stays_while_a_peer_fetches_it_and_no_longer(peer: BlobStore) -> None:
    server, digest = BlobServer(peer), peer.put(bytes(8000))
    server.reply(GetBlob(digest=digest, offset=0, length=1), 5.0)
    server.expire(4.9 + LEASE_S)
    with pytest.raises(Overloaded):
        peer.put(b"x" * 9000)
    other = peer.put(b"")
    server.reply(GetBlob(digest=other, offset=0, length=1), 5.0 + LEASE_S)
    peer.put(b"x" * 9000)
    for i in range(MAX_LEASES + 1):
        server.reply(GetBlob(digest=peer.put(bytes([i]) * 8), offset=0, length=1), 99.0)
    peer.put(b"y" * (10_000 - 8 * MAX_LEASES))  # the first lease made way
