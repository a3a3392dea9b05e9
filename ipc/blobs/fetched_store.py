"""FetchedStore: a BlobStore on another host than the head, which fetches the blobs that it lacks from there."""

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
    """Where blobs come from. Each fetch has a connection of its own, so that any thread may call it."""

    def __init__(self, address: str, secure: Callable[[zmq.Socket[bytes]], None]) -> None:
        """`secure` gives a socket the keys for the head."""
        self._address, self._secure = address, secure

    def fetch(self, store: BlobStore, digest: bytes, timeout_s: float) -> None:
        """Fetch a blob into a store; do nothing if the head has no such blob. Overloaded if it does not come within
        `timeout_s`, or cannot be written."""
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
    """A store with an `open` that waits for a blob, at most `timeout_s`."""

    def __init__(self, folder: Path, max_bytes: int, head: HeadBlobs, timeout_s: float) -> None:
        super().__init__(folder, max_bytes)
        self._head, self._timeout_s = head, timeout_s

    def open(self, digest: bytes) -> memoryview | None:
        """Map a blob as BlobStore does, after fetching it if it is not here. Overloaded as HeadBlobs.fetch."""
        blob = super().open(digest)
        if blob is None:
            self._head.fetch(self, digest, self._timeout_s)
            blob = super().open(digest)
        return blob
