"""RESP: Redis' protocol; long values are received directly into the memory where they belong.

One thread at a time uses a Connection. It raises OSError (TimeoutError, ConnectionError) if the network fails or the
peer does not speak RESP; replies may then be outstanding, so the connection must be closed. Error replies of the server
are returned as data: ServerError.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

READ_BYTES = 8192  # most bytes read ahead: a reply's start, an object's header, little of its payload
MAX_TEXT_BYTES = 16 << 20  # limit of a reply that is not received into place
MAX_ITEMS = 1 << 20  # limit of an array
MAX_DEPTH = 4  # of nested arrays; CLUSTER SLOTS needs 3
MAX_BUFFERS = 64  # buffers in one call of sendmsg
SILENCE_S = 3.0  # after this time without a byte the peer counts as hung, long before a load's deadline


class ServerError(NamedTuple):
    """Error reply of the server, such as `OOM command not allowed`."""

    text: str

    @property
    def code(self) -> str:
        return self.text.partition(" ")[0]


Reply: TypeAlias = "int | bytes | ServerError | list[Reply] | None"
Buffer: TypeAlias = bytes | memoryview


def command(*words: bytes) -> bytes:
    """Return an encoded command."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class Connection:
    """Connected socket with the bytes that were read ahead. `owner`: an object to keep alive as long as the
    connection."""

    def __init__(self, connected: socket.socket, owner: object = None, silence_s: float = SILENCE_S) -> None:
        self._socket, self._silence_s = connected, silence_s
        self._owner = owner
        self._view = memoryview(bytearray(READ_BYTES))
        self._start = self._end = 0  # range of the bytes read ahead

    def is_usable(self) -> bool:
        """Return whether the connection is open and nothing unexpected has arrived. Call it between two commands."""
        if self._start != self._end or self._socket.fileno() < 0:
            return False
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return not poller.poll(0)

    def send(self, buffers: Sequence[Buffer], deadline: float) -> None:
        """Send all bytes of `buffers` without joining them."""
        waiting = deque(memoryview(buffer) for buffer in buffers)
        while waiting:
            self._limit(deadline)
            if isinstance(self._socket, ssl.SSLSocket):  # it has no sendmsg
                num_sent = self._socket.send(waiting[0])
            else:
                num_sent = self._socket.sendmsg(list(islice(waiting, MAX_BUFFERS)))
            while waiting and num_sent >= len(waiting[0]):
                num_sent -= len(waiting.popleft())
            if num_sent:
                waiting[0] = waiting[0][num_sent:]

    def receive(self, deadline: float, depth: int = 0) -> Reply:
        """Receive and return one reply. depth: the number of arrays around it. ConnectionError if it is not a valid
        reply."""
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ServerError(rest.decode(errors="replace"))
        if kind == b":":
            return _number(rest)
        if kind == b"$" and (length := _number(rest)) <= MAX_TEXT_BYTES:
            if length < 0:
                return None
            text = bytearray(length)
            self._read(memoryview(text), deadline)
            self._end_value(deadline)
            return bytes(text)
        if kind == b"*" and (length := _number(rest)) <= MAX_ITEMS and depth < MAX_DEPTH:
            return None if length < 0 else [self.receive(deadline, depth + 1) for _ in range(length)]
        raise ConnectionError(f"not a reply of Redis: {line[:40]!r}")

    def receive_value(self, parts: Sequence[memoryview], deadline: float) -> bool | ServerError | None:
        """Receive a reply to GET into `parts`, one after the other. ConnectionError if it is not a valid reply.

        Return True if they are filled; False if the value has another length (they are then unchanged); None if there
        is no value; ServerError for an error reply."""
        line = self._line(deadline)
        if line[:1] == b"-":
            return ServerError(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise ConnectionError(f"not a reply to GET: {line[:40]!r}")
        length = _number(line[1:])
        if length < 0:
            return None
        is_expected = length == sum(map(len, parts))
        if is_expected:
            for part in parts:
                self._read(part, deadline)
        else:
            self._skip(length, deadline)
        self._end_value(deadline)
        return is_expected

    def close(self) -> None:
        self._socket.close()

    def _line(self, deadline: float) -> bytes:
        while True:
            ahead = bytes(self._view[self._start : self._end])
            line, end, _ = ahead.partition(b"\r\n")
            if end:
                self._start += len(line) + 2
                return line
            if len(ahead) == READ_BYTES:
                raise ConnectionError(f"not a reply of Redis: {ahead[:40]!r}")
            self._view[: len(ahead)] = ahead
            self._start, self._end = 0, len(ahead)
            self._end += self._receive_into(self._view[self._end :], deadline)

    def _read(self, part: memoryview, deadline: float) -> None:
        num_ahead = min(self._end - self._start, len(part))
        part[:num_ahead] = self._view[self._start : self._start + num_ahead]
        self._start += num_ahead
        while num_ahead < len(part):
            num_ahead += self._receive_into(part[num_ahead:], deadline)

    def _skip(self, num_bytes: int, deadline: float) -> None:
        waste = memoryview(bytearray(min(num_bytes, 1 << 20)))
        while num_bytes:
            part = waste[:num_bytes]
            self._read(part, deadline)
            num_bytes -= len(part)

    def _end_value(self, deadline: float) -> None:
        if self._line(deadline):
            raise ConnectionError("a value is longer than its length")

    def _receive_into(self, view: memoryview, deadline: float) -> int:
        self._limit(deadline)
        num_bytes = self._socket.recv_into(view)
        if not num_bytes:
            raise ConnectionError("the server closed the connection")
        return num_bytes

    def _limit(self, deadline: float) -> None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("no answer in time")
        self._socket.settimeout(min(remaining_s, self._silence_s))


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConnectionError(f"not a number of Redis: {text[:40]!r}") from None
