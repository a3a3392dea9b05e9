"""BlobFetch: the transfer of one blob from a peer's store into this one. It owns a file, but no socket and no clock.

The caller sends `requests`, passes the replies to `receive`, and calls `requests` again at `deadline`. Chunks are
written and hashed as they arrive, so each call takes about a millisecond per chunk.
"""

from __future__ import annotations

import math
from enum import Enum, auto

from ..errors import Overloaded, TokenloomError
from ..messages.blobs import MAX_CHUNK_BYTES, MAX_CHUNKS_IN_FLIGHT, BlobReply, GetBlob, NoBlob
from .store import BlobStore
from .writer import BlobWriter

MAX_BACKOFF = 16


class FetchState(Enum):
    FETCHING = auto()
    MISSING = auto()  # the peer has no such blob
    DONE = auto()  # the store has it
    FAILED = auto()  # `BlobFetch.error` says why


LEGAL_MOVES = {
    (FetchState.FETCHING, FetchState.MISSING),
    (FetchState.FETCHING, FetchState.DONE),
    (FetchState.FETCHING, FetchState.FAILED),
    (FetchState.MISSING, FetchState.FETCHING),  # from another peer
    (FetchState.MISSING, FetchState.FAILED),  # cancelled
}


class BlobFetch:
    """Transfer of one blob: a BlobWriter has the bytes before the first gap; at most MAX_CHUNKS_IN_FLIGHT chunks after
    the gap are kept in memory."""

    chunk_bytes = MAX_CHUNK_BYTES
    retry_s = 2.0  # repeat requests after this long without a chunk; doubled each time, up to MAX_BACKOFF × retry_s

    def __init__(self, store: BlobStore, digest: bytes, user: str = "") -> None:
        self.digest = digest
        self.state = FetchState.FETCHING
        self.error = ""
        self.is_full = False  # it failed with Overloaded: the folder or the disk is full, or something else ran out
        self.deadline = 0.0  # call `requests` at this time, if no reply arrives before
        self._store = store
        self._user = user  # the store pins the blob for this user; "": it does not
        self._size = 1  # bytes of the blob; 1 until the first reply has the size, so that one chunk is requested
        self._writer: BlobWriter | None = None  # None until the first chunk
        self._next_offset = 0  # offset of the first chunk that was never requested
        self._in_flight: dict[int, bool] = {}  # offset → whether the request was sent
        self._ahead: dict[int, bytes] = {}  # chunks after a gap, by offset
        self._backoff = 1

    def requests(self, now: float) -> list[GetBlob]:
        """Return the requests to send now: those for new chunks within the window and, from `deadline` on, all that
        have had no reply."""
        if self.state is not FetchState.FETCHING:
            return []
        if now >= self.deadline and self._in_flight:
            self._in_flight = dict.fromkeys(self._in_flight, False)
            self._backoff = min(2 * self._backoff, MAX_BACKOFF)
        num_written = 0 if self._writer is None else self._writer.num_bytes
        end = min(self._size, num_written + MAX_CHUNKS_IN_FLIGHT * self.chunk_bytes)
        while self._next_offset < end:
            self._in_flight[self._next_offset] = False
            self._next_offset += self.chunk_bytes
        unsent = [offset for offset, is_sent in self._in_flight.items() if not is_sent]
        if unsent:
            self._in_flight = dict.fromkeys(self._in_flight, True)
            self.deadline = now + self.retry_s * self._backoff
        return [GetBlob(digest=self.digest, offset=offset, length=self.chunk_bytes) for offset in unsent]

    def receive(self, reply: BlobReply, now: float) -> None:
        """Apply a reply; a repeated one changes nothing. A wrong reply, or a failure to write, ends the fetch."""
        if self.state is not FetchState.FETCHING or reply.digest != self.digest:
            return
        if isinstance(reply, NoBlob):
            self._move(FetchState.MISSING)
            return
        if reply.offset not in self._in_flight:
            return
        expected = reply.size if self._writer is None else self._size
        length = min(self.chunk_bytes, expected - reply.offset)
        if reply.size != expected or len(reply.data) != length:
            received = f"{len(reply.data)} bytes at {reply.offset} of {reply.size}"
            self._fail(f"the peer sent {received}, expected {length} of {expected}")
            return
        del self._in_flight[reply.offset]
        self._ahead[reply.offset] = reply.data
        self._backoff = 1
        self.deadline = now + self.retry_s
        try:
            self._write(expected)
        except (TokenloomError, OSError) as error:
            self.is_full = isinstance(error, Overloaded)
            self._fail(str(error))

    def resume(self) -> None:
        """Continue with another peer: keep the chunks that have arrived, and let `requests` repeat all requests in
        flight."""
        if self.state is FetchState.MISSING:
            self._move(FetchState.FETCHING)
        self._in_flight = dict.fromkeys(self._in_flight, False)
        self._backoff = 1
        self.deadline = math.inf  # until `requests` is called

    def cancel(self) -> None:
        """End the fetch and remove its file, if it has not ended."""
        if self.state in (FetchState.FETCHING, FetchState.MISSING):
            self._fail("cancelled")

    def _write(self, size: int) -> None:
        """Write the received chunks up to the next gap. After the last byte check the digest, add the blob to the store
        and end the fetch. `size`: bytes of the blob."""
        if self._writer is None:
            self._size, self._writer = size, BlobWriter(self._store.folder, size)
        writer = self._writer
        while (data := self._ahead.pop(writer.num_bytes, None)) is not None:
            writer.write(data)
        if writer.num_bytes < size:
            return
        if writer.digest() != self.digest:
            self._fail(f"the {size} bytes from the peer have SHA-256 {writer.digest().hex()}, not {self.digest.hex()}")
            return
        self._store.add(writer, self._user)
        self._move(FetchState.DONE)

    def _fail(self, error: str) -> None:
        if self._writer is not None:
            self._writer.close()
        self._ahead.clear()
        self.error = error
        self._move(FetchState.FAILED)

    def _move(self, state: FetchState) -> None:
        if (self.state, state) not in LEGAL_MOVES:
            raise AssertionError(f"fetch {self.digest.hex()}: {self.state.name} → {state.name} is not a legal move")
        self.state = state
        self.deadline = math.inf if state is not FetchState.FETCHING else self.deadline
