"""FetchedStore: the BlobStore of a host that is not the head; it fetches missing blobs from the head."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import zmq

from ..errors import Overloaded
from ..sockets.zmq_sockets import new_socket
from .channel import exchange
from .fetch import BlobFetch, FetchState
from .store import BlobStore

MAX_POLL_S = 0.5


class HeadBlobs:
    """Client of the head's blob server. Each fetch opens its own connection, so any thread may call `fetch`."""

    def __init__(self, address: str, secure: Callable[[zmq.Socket[bytes]], None]) -> None:
        """`secure`: sets a socket's keys for a connection to the head."""
        self._address, self._secure = address, secure

    def fetch(self, store: BlobStore, digest: bytes, timeout_s: float) -> None:
        """Fetch a blob into a store; do nothing if the head has no such blob. Overloaded if the blob has not arrived
        after `timeout_s`, is wrong, or cannot be written."""
        fetch, deadline = BlobFetch(store, digest), time.monotonic() + timeout_s
        with zmq.Context() as context, new_socket(context, zmq.DEALER) as socket:
            self._secure(socket)
            socket.connect(self._address)
            while fetch.state is FetchState.FETCHING:
                now = time.monotonic()
                if now >= deadline:
                    fetch.cancel()
                    raise Overloaded(f"blob {digest.hex():.16} did not come from the head within {timeout_s:g} s")
                exchange(socket, {digest: fetch}, now)
                socket.poll(int(max(min(fetch.deadline, deadline, now + MAX_POLL_S) - now, 0) * 1000) + 1)
        if fetch.state is FetchState.FAILED:
            raise Overloaded(f"blob {digest.hex():.16} cannot be fetched from the head: {fetch.error}")


class FetchedStore(BlobStore):
    """BlobStore with an `open` that fetches a missing blob from the head and waits for it, for at most `timeout_s`."""

    def __init__(self, folder: Path, max_bytes: int, head: HeadBlobs, timeout_s: float) -> None:
        super().__init__(folder, max_bytes)
        self._head, self._timeout_s = head, timeout_s

    def open(self, digest: bytes) -> memoryview | None:
        """Map a blob for reading, and fetch it first if this host lacks it. None if the head lacks it too. Overloaded
        if the fetch takes longer than `timeout_s` or fails."""
        blob = super().open(digest)
        if blob is None:
            self._head.fetch(self, digest, self._timeout_s)
            blob = super().open(digest)
        return blob
