"""Continuation: all that an HTTP request needs to go on in another frontend.

Everything random in an answer is derived from the request's nonce, and every time in it from `created`, so that a
successor builds the same ids. A part of an answer that is sent says which tokens it shows (Shown). Knows no socket and
does not store anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Iterator
from contextvars import ContextVar

import msgspec

NONCE_BYTES = 16
SHOWN = "shown"  # key in the ASGI messages below: the Shown
TOKENS = "tokenloom.tokens"  # ASGI message without bytes: tokens of a whole answer, whose bytes follow at its end


class Answer(msgspec.Struct):
    """One choice of a request, as far as the client has it."""

    token_ids: list[int]
    finish_reason: str | None = None  # if it has ended


class Shown(msgspec.Struct):
    """State that an answer has reached with a part of its body."""

    tokens: list[tuple[int, int]]  # (choice, token id), beyond the parts before
    ended: list[tuple[int, str]]  # (choice, finish reason), beyond the parts before
    num_events: int  # from the start of the answer
    num_cached: int  # tokens of the prompts, of choices with tokens, that were in the prefix cache
    seed: int = 0  # of the whole request; the same in each part


class Continuation(msgspec.Struct):
    """Start and state of a request. A choice is position of the prompt × n + index of the answer."""

    nonce: bytes  # NONCE_BYTES random bytes
    created: float  # unix seconds of the request's first byte
    answers: dict[int, Answer] = {}  # by choice
    num_events: int = 0  # the last Shown's
    num_cached: int = 0  # the last Shown's
    seed: int = 0  # the last Shown's
    is_resumed: bool = False  # whether the client has bytes of the answer
    is_kept: bool = False  # whether somebody reads the Shown of each part; without a reader none is made

    def draw(self, purpose: str, num_bytes: int) -> bytes:
        """Return up to 64 bytes that depend only on the nonce and the purpose."""
        return hashlib.blake2b(purpose.encode(), digest_size=num_bytes, key=self.nonce).digest()

    def digits(self, purpose: str, num_digits: int = 32) -> str:
        """Return digits (base 16) that depend only on the nonce and the purpose."""
        return self.draw(purpose, num_digits // 2).hex()


_current: ContextVar[Continuation] = ContextVar("continuation")


def current() -> Continuation:
    """Return the continuation of the request that is being worked on, or one for a new request."""
    found = _current.get(None)
    return new_continuation() if found is None else found


def new_continuation() -> Continuation:
    """Return the continuation of a request that begins now."""
    return Continuation(nonce=secrets.token_bytes(NONCE_BYTES), created=time.time())


@contextlib.contextmanager
def working_on(continuation: Continuation) -> Iterator[None]:
    """Make this the continuation of the request on which the context, and each task that it starts, works."""
    token = _current.set(continuation)
    try:
        yield
    finally:
        _current.reset(token)
