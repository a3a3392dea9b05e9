"""ClientSession: the frontend's state of one client, keyed by its socket identity.

It holds the client's open requests and the answers with unsent updates. It limits the messages in flight (credits) and
determines when the client counts as dead (lease). Messages to the client are put into the outbox of the SessionTable.
LocalSession is the session of a client in the frontend's own process: the HTTP server, or an in-process engine's owner.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from ....ipc.codec import encode
from ....ipc.messages.base import LEASE_S
from ....ipc.messages.client import CREDIT_WINDOW, Delta, Deltas, FrontendMessage
from ...listening.keys.api_keys import ApiKey

RequestT = TypeVar("RequestT")  # the state of an open request
ClientLoss: TypeAlias = Literal["gone", "silent", "slow"]  # why a client is removed; a metric label

MAX_DELTAS_BYTES = 4 << 20  # approximate size of one Deltas message; further updates go into the next one
MAX_IN_FLIGHT_BYTES = 32 << 20  # bytes of uncredited Deltas; with more, updates wait for credits
NEVER = float("inf")  # a time that never comes


class Caller(NamedTuple):
    """The sender of an HTTP request: its address and a digest of its key, and the key."""

    peer: str = ""
    key: ApiKey | None = None


class HasDelta(Protocol):
    """An answer that returns its unsent updates as one delta."""

    def take_delta(self) -> Delta: ...


class ClientSession(Generic[RequestT]):
    """Requests and unsent updates of one client.

    Invariant: each unsent answer belongs to a request of this session; at most CREDIT_WINDOW Deltas are in flight, and
    another is sent only while those in flight have less than MAX_IN_FLIGHT_BYTES.
    """

    def __init__(self, identity: bytes, now: float, outbox: list[tuple[bytes, bytes]]) -> None:
        """`outbox`: list to which (identity, frame) of each message is appended. `now`: monotonic seconds."""
        self.identity = identity
        self._outbox = outbox
        self.last_seen = now  # monotonic seconds
        self.request_by_id: dict[str, RequestT] = {}
        self.unsent: dict[int, HasDelta] = {}  # by answer key, in the order of their first unsent update
        self.refusals: list[Delta] = []  # final deltas of requests without answers
        self.echoes: list[Delta] = []  # tokens that come again, before those of `unsent`
        self._in_flight: deque[int] = deque()  # bytes of the Deltas messages that the client has not credited

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def can_repeat(self) -> bool:
        """Whether the client keeps the bytes of its media and can send them again."""
        return True

    @property
    def has_open_work(self) -> bool:
        """Whether requests are open or updates are unsent."""
        return bool(self.request_by_id or self.has_updates)

    @property
    def has_lease(self) -> bool:
        """Whether the client must send a message within LEASE_S: only while it has open work."""
        return self.has_open_work

    @property
    def has_updates(self) -> bool:
        return bool(self.unsent or self.refusals or self.echoes)

    @property
    def lease_end(self) -> float:
        return self.last_seen + LEASE_S

    def owner_of(self, request_id: str) -> str:
        """Return the owner of the request's jobs in fair queues: the client's identity."""
        return self.identity.hex()

    def caller_of(self, request_id: str) -> str:
        """Return the request's caller, for equal shares of the grammar compilers: the client's identity."""
        return self.identity.hex()

    def key_of(self, request_id: str) -> ApiKey | None:
        """Return the API key of the request; None without one."""
        return None

    def send(self, message: FrontendMessage) -> None:
        self._outbox.append((self.identity, encode(message)))

    def credit(self, count: int) -> None:
        for _ in range(min(count, self.num_in_flight)):
            self._in_flight.popleft()

    def reset_credits(self) -> None:
        """Forget the messages in flight. After a second Hello the client sends no Credit for earlier messages."""
        self._in_flight.clear()

    def take_frames(self) -> list[bytes]:
        """Remove as many unsent updates as credits allow and return them as frames of Deltas. The updates of an answer
        that stay are merged with its later ones."""
        frames = []
        while self.has_updates and self.num_in_flight < CREDIT_WINDOW and sum(self._in_flight) < MAX_IN_FLIGHT_BYTES:
            frames.append(encode(Deltas(deltas=self._take_deltas())))
            self._in_flight.append(len(frames[-1]))
        return frames

    def _take_deltas(self) -> list[Delta]:
        deltas = self.refusals + self.echoes
        self.refusals = []
        self.echoes = []
        num_ready = len(deltas)
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
                num_taken = len(deltas) - num_ready
                self.unsent = dict(itertools.islice(unsent.items(), num_taken, None))
                break
        return deltas


def _logprob_bytes(delta: Delta) -> int:
    return sum(4 * len(logprobs.token_ids) for logprobs in (delta.logprobs, delta.prompt_logprobs) if logprobs)


class LocalSession(ClientSession[RequestT]):
    """Session of an in-process client, which gets messages as structs instead of frames, without delay.

    Delivery cannot fail, so the lease never ends, the session is never evicted, and no credits are counted.
    `num_readers`, set by the client: the number of HTTP requests that have not yet written all delivered messages.
    """

    def __init__(
        self, identity: bytes, deliver: Callable[[FrontendMessage], None], find_caller: Callable[[str], Caller]
    ) -> None:
        """`deliver` is called in the frontend's loop: it must be fast and must not raise. `find_caller` returns, for a
        request id, the address and API key of the HTTP request that sent it."""
        super().__init__(identity, NEVER, [])
        self._deliver, self._find_caller = deliver, find_caller
        self.num_readers = 0

    def send(self, message: FrontendMessage) -> None:
        self._deliver(message)

    def owner_of(self, request_id: str) -> str:
        """Return the owner of the request's jobs: the id of its HTTP request, whose prompts are `id/0`, `id/1` …"""
        return request_id.partition("/")[0]

    def caller_of(self, request_id: str) -> str:
        """Return the address and API key that the HTTP request came from."""
        return self._find_caller(request_id).peer

    def key_of(self, request_id: str) -> ApiKey | None:
        return self._find_caller(request_id).key

    @property
    def can_repeat(self) -> bool:
        return False

    @property
    def has_open_work(self) -> bool:
        return bool(self.num_readers) or super().has_open_work

    @property
    def has_lease(self) -> bool:
        return True

    @property
    def lease_end(self) -> float:
        return NEVER

    def take_frames(self) -> list[bytes]:
        while self.has_updates:
            self._deliver(Deltas(deltas=self._take_deltas()))
        return []
