"""The two ends of the blob channel: BlobServer and `exchange`. Callers own and poll the ZeroMQ sockets; no call waits
for a peer."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Protocol

import zmq

from ..codec import Decoder, encode
from ..errors import ProtocolError
from ..messages.blobs import MAX_CHUNK_BYTES, BlobChunk, BlobReply, GetBlob, NoBlob
from ..sockets.zmq_sockets import receive
from .fetch import BlobFetch

LEASE_S = 30.0  # a blob stays mapped, and so is not evicted, for this long after a peer's last request
MAX_LEASES = 64


class Blob(Protocol):
    """Bytes of which parts can be read, such as a memoryview."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> bytes | memoryview: ...


class BlobSource(Protocol):
    """Interface of a store that blobs are served from."""

    def open(self, digest: bytes) -> Blob | None:
        """Return the blob with this SHA-256, readable while it is referenced; None if the store lacks it or has found
        it damaged. The receiver checks the digest, too."""


class BlobServer:
    """Server of a store's blobs. It keeps the blobs that peers are fetching mapped. Call it in a thread: the first
    request for a blob that another process has stored hashes the whole blob."""

    def __init__(self, store: BlobSource) -> None:
        self.num_malformed = 0
        self._store = store
        self._leases: dict[bytes, tuple[Blob, float]] = {}  # digest → blob and end of its lease; first to end first
        self._decoder = Decoder[GetBlob](GetBlob)

    def reply(self, request: GetBlob, now: float) -> BlobReply | None:
        """Return the requested part of a blob, or NoBlob; None if no descriptor or memory is free: the peer then
        repeats its request. The blob stays mapped for LEASE_S, or until MAX_LEASES other blobs have been requested."""
        self.expire(now)
        lease = self._leases.pop(request.digest, None)
        try:
            blob = self._store.open(request.digest) if lease is None else lease[0]
        except OSError:  # no descriptor or memory is free
            return None
        if blob is None or not 0 <= request.offset <= len(blob):
            return NoBlob(digest=request.digest)
        self._leases[request.digest] = blob, now + LEASE_S
        if len(self._leases) > MAX_LEASES:
            del self._leases[next(iter(self._leases))]
        end = request.offset + max(0, min(request.length, MAX_CHUNK_BYTES))
        data = bytes(blob[request.offset : end])
        return BlobChunk(digest=request.digest, offset=request.offset, size=len(blob), data=data)

    def expire(self, now: float) -> None:
        """Unmap blobs that no peer has requested for LEASE_S."""
        for digest in [digest for digest, (_, end) in self._leases.items() if end <= now]:
            del self._leases[digest]

    def answer(self, socket: zmq.Socket[bytes], now: float) -> None:
        """Reply to all waiting requests of a ROUTER socket; drop malformed requests, and replies to peers that are
        gone."""
        for identity, frame in receive(socket, 2):
            try:
                reply = self.reply(self._decoder.decode(frame), now)
            except ProtocolError:
                self.num_malformed += 1
                continue
            if reply is not None:
                with contextlib.suppress(zmq.ZMQError):
                    socket.send_multipart([identity, encode(reply)], zmq.NOBLOCK)


_replies = Decoder[BlobReply](BlobReply)


def exchange(socket: zmq.Socket[bytes], fetches: Mapping[bytes, BlobFetch], now: float) -> None:
    """Read the replies that wait at a DEALER socket, pass each to the fetch of its digest, and send the requests that
    are due. `fetches`: by digest."""
    for (frame,) in receive(socket):
        with contextlib.suppress(ProtocolError):  # the fetch repeats the request
            reply = _replies.decode(frame)
            if (fetch := fetches.get(reply.digest)) is not None:
                fetch.receive(reply, now)
    for fetch in fetches.values():
        for request in fetch.requests(now):
            with contextlib.suppress(zmq.Again):  # the peer has just closed the connection: the fetch repeats it
                socket.send(encode(request), zmq.NOBLOCK)
