"""ClientSession: what the frontend knows of one client connection.

A session is its socket's identity. It holds the client's open requests and the answers with unsent news; it decides
how much may be sent (credits) and when the client is taken for dead (lease). Sends nothing itself.
A LocalSession is that of a client in the frontend's own process, as the HTTP server is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ...ipc.codec import encode
from ...ipc.messages.base import LEASE_S
from ...ipc.messages.client import CREDIT_WINDOW, Delta, Deltas, FrontendMessage

RequestT = TypeVar("RequestT")  # what the owner of the sessions keeps of an open request

MAX_DELTAS_BYTES = 4 << 20  # of one message, about; more news go into the next one


class HasDelta(Protocol):
    """Something whose news can be taken as one delta."""

    def take_delta(self) -> Delta: ...


class ClientSession(Generic[RequestT]):
    """Invariant: every unsent answer's request belongs to this session; at most CREDIT_WINDOW Deltas are in flight."""

    def __init__(self, identity: bytes, now: float) -> None:
        self.identity = identity
        self.last_seen = now  # monotonic seconds
        self.request_by_id: dict[str, RequestT] = {}
        self.unsent: dict[int, HasDelta] = {}  # by key, in the order of their news
        self.refusals: list[Delta] = []  # ends of requests that never had answers
        self.num_in_flight = 0  # Deltas messages that the client has not credited

    @property
    def has_open_work(self) -> bool:
        """Whether the client has not been sent all that it asked for."""
        return bool(self.request_by_id or self.has_updates)

    @property
    def has_lease(self) -> bool:
        """Whether silence counts: only while something is owed to the client."""
        return self.has_open_work

    @property
    def has_updates(self) -> bool:
        return bool(self.unsent or self.refusals)

    @property
    def lease_end(self) -> float:
        return self.last_seen + LEASE_S

    def caller_of(self, request_id: str) -> str:
        """Who counts as the caller of a request, where callers share something fairly."""
        return self.identity.hex()

    def credit(self, count: int) -> None:
        self.num_in_flight = max(0, self.num_in_flight - count)

    def restart(self) -> None:
        """The client says Hello again: what was in flight to it is lost or taken, either way not to be waited for."""
        self.num_in_flight = 0

    def take_frames(self) -> list[bytes]:
        """Encoded Deltas with all news, as far as credits go; the rest stays, merged per answer."""
        frames = []
        while (self.unsent or self.refusals) and self.num_in_flight < CREDIT_WINDOW:
            frames.append(encode(Deltas(deltas=self._take_deltas())))
            self.num_in_flight += 1
        return frames

    def _take_deltas(self) -> list[Delta]:
        deltas, self.refusals = self.refusals, []
        num_refusals = len(deltas)
        num_bytes = sum([len(delta.request_id) + 256 for delta in deltas])
        unsent, self.unsent = self.unsent, {}
        for answer in unsent.values():
            delta = answer.take_delta()
            deltas.append(delta)
            num_bytes += len(delta.token_ids) + len(delta.text)
            if delta.embedding is not None:
                num_bytes += len(delta.embedding.data)
            if delta.logprobs is not None or delta.prompt_logprobs is not None:
                num_bytes += _logprob_bytes(delta)
            if num_bytes > MAX_DELTAS_BYTES:
                num_taken = len(deltas) - num_refusals
                self.unsent = dict(itertools.islice(unsent.items(), num_taken, None))
                break
        return deltas


def _logprob_bytes(delta: Delta) -> int:
    return sum(4 * len(logprobs.token_ids) for logprobs in (delta.logprobs, delta.prompt_logprobs) if logprobs)


_FOR_EVER = float("inf")


class LocalSession(ClientSession[RequestT]):
    """Gets structs, not frames, in the turn in which they are made. Nothing can be lost between the two, so that there
    is no lease (never silent, the table neither forgets it nor takes it for dead), and what it is told is never in
    flight, so that there are no credits.

    `num_readers` is its owner's: of those who have not passed on yet all that was delivered to them.
    """

    def __init__(self, identity: bytes, deliver: Callable[[FrontendMessage], None]) -> None:
        """`deliver` is called in the frontend's loop; it must be cheap and must not raise."""
        super().__init__(identity, _FOR_EVER)
        self.deliver = deliver
        self.num_readers = 0

    def caller_of(self, request_id: str) -> str:
        """The request itself: `id` of all its prompts `id/0`, `id/1` …"""
        return request_id.partition("/")[0]

    @property
    def has_open_work(self) -> bool:
        return bool(self.num_readers) or super().has_open_work

    @property
    def has_lease(self) -> bool:
        return True

    @property
    def lease_end(self) -> float:
        return _FOR_EVER

    def take_frames(self) -> list[bytes]:
        while self.has_updates:
            self.deliver(Deltas(deltas=self._take_deltas()))
        return []
