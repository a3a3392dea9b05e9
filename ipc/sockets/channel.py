"""Channel: a socket with typed messages, one union of message types in each direction.

A malformed frame is dropped and counted; the 1st, 2nd, 4th, 8th … of a kind of peer is logged. Knows no message type.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

import zmq

from ..codec import Decoder, encode
from ..errors import ProtocolError
from ..process.log import is_worth_a_line
from .zmq_sockets import receive

ReceivedT = TypeVar("ReceivedT")
SentT = TypeVar("SentT")

logger = logging.getLogger("tokenloom.ipc")


class Channel(Generic[ReceivedT, SentT]):
    """Owner of a socket. `counts` holds the number of malformed frames and may be shared with other channels."""

    def __init__(
        self, socket: zmq.Socket[bytes], received: object, peer: str, counts: Counter[str] | None = None
    ) -> None:
        """`received`: the union of the messages that arrive; `peer`: the sender's role, for counts and log."""
        self.socket, self._peer = socket, peer
        self.counts: Counter[str] = Counter() if counts is None else counts
        self._decoder: Decoder[ReceivedT] = Decoder(received)

    def receive(self) -> Iterator[ReceivedT]:
        """Yield all waiting messages without blocking; drop malformed ones."""
        for (frame,) in receive(self.socket):
            if (message := self._decode(frame)) is not None:
                yield message

    def receive_from(self, limit_s: float = math.inf) -> Iterator[tuple[bytes, ReceivedT]]:
        """Yield the waiting messages of a ROUTER socket with their senders' identities, for at most `limit_s`."""
        deadline = time.monotonic() + limit_s
        for identity, frame in receive(self.socket, num_parts=2):
            if (message := self._decode(frame)) is not None:
                yield identity, message
            if time.monotonic() > deadline:
                return

    def receive_one(self, flags: int = zmq.NOBLOCK) -> ReceivedT | None:
        """Return the next message, None if it is malformed. If none waits, raise zmq.Again; with `flags` 0, block."""
        return self._decode(self.socket.recv_multipart(flags)[-1])

    def wait(self) -> ReceivedT:
        """Block until a message arrives."""
        while (message := self.receive_one(flags=0)) is None:
            pass
        return message

    def send(self, message: SentT) -> None:
        self.socket.send(encode(message))

    def send_to(self, identity: bytes, message: SentT) -> bool:
        """Send through a ROUTER socket; False if the peer is gone."""
        try:
            self.socket.send_multipart([identity, encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _decode(self, frame: bytes) -> ReceivedT | None:
        try:
            return self._decoder.decode(frame)
        except ProtocolError as error:
            count_malformed(self.counts, self._peer, error)
            return None

    def count_malformed(self, error: ProtocolError) -> None:
        """Count, as malformed, a message that its receiver refuses."""
        count_malformed(self.counts, self._peer, error)


def count_malformed(counts: Counter[str], peer: str, error: ProtocolError) -> None:
    """Count a malformed frame of `peer` as malformed_<peer>_frames; log the 1st, 2nd, 4th, 8th …"""
    name = f"malformed_{peer}_frames"
    counts[name] += 1
    if is_worth_a_line(counts[name]):
        logger.warning("%d malformed from the %s; the last: %s", counts[name], peer, error)
