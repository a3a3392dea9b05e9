"""Both ends of the blob channel over ZeroMQ sockets that their callers own and poll. No call waits for a peer."""

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

LEASE_S = 30.0  # a blob is not evicted this long after a peer's last request
MAX_LEASES = 64


class Blob(Protocol):
    """Bytes of which parts can be read, such as a memoryview."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> bytes | memoryview: ...


class BlobSource(Protocol):
    """Interface of a store that blobs are served from."""

    def open(self, digest: bytes) -> Blob | None:
        """Return an undamaged blob, which stays while it is referenced; None if there is none."""


class BlobServer:
    """Replies to peers from a store, and maps blobs that are being fetched. Call it in a thread, since the first
    request for a blob that another process has put hashes it."""

    def __init__(self, store: BlobSource) -> None:
        self.num_malformed = 0
        self._store = store
        self._leases: dict[bytes, tuple[Blob, float]] = {}  # by digest: the blob and the end; soonest first
        self._decoder = Decoder[GetBlob](GetBlob)

    def reply(self, request: GetBlob, now: float) -> BlobReply | None:
        """Return the requested part of a blob, or NoBlob; None if it cannot be read now, and the peer is to ask again.
        The blob stays mapped for LEASE_S, or until MAX_LEASES others are."""
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
        """Reply to all requests that wait at a ROUTER; drop a malformed one, and a reply to a peer that is gone."""
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
    """Pass the replies that wait at a DEALER to their fetches, by digest, and send the requests that are due."""
    for (frame,) in receive(socket):
        with contextlib.suppress(ProtocolError):  # its request is repeated
            reply = _replies.decode(frame)
            if (fetch := fetches.get(reply.digest)) is not None:
                fetch.receive(reply, now)
    for fetch in fetches.values():
        for request in fetch.requests(now):
            with contextlib.suppress(zmq.Again):  # the peer has just closed the connection: it is repeated, too
                socket.send(encode(request), zmq.NOBLOCK)
