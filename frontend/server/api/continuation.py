"""Continuation: all that an HTTP request needs to go on in another frontend.

Everything random in an answer is derived from the request's nonce, and every time in it from `created`, so that a
successor builds the same ids. A part of an answer that is sent says which tokens it shows (Shown). In the successor the
engine echoes these tokens; all that is rendered of them stays unsent (`is_muted`), and the rest is as in the first
frontend. Knows no socket and does not store anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import cast

import msgspec

from ....ipc.codec import encode_ids
from ....ipc.messages.base import FinishReason
from ....ipc.messages.client import Accepted, Child, Delta, Logprobs, Submit, with_digests
from ....ipc.params.sampling_params import child_seed
from ...forms.logprobs import single_tokens
from ...listening.journal.tokens import ShownAnswers
from ...listening.keys.api_keys import ApiKey

NONCE_BYTES = 16
SHOWN = "shown"  # key in the ASGI messages below: the Shown
TOKENS = "tokenloom.tokens"  # ASGI message without bytes: tokens of a whole answer, whose bytes follow at its end


class Sources(msgspec.Struct, frozen=True, array_like=True):
    """Digests of the inputs of answers to a prompt beside the request and the model."""

    adapter: bytes = b""  # empty: none
    media: list[bytes] = []  # of the bytes of each medium


_encode = msgspec.msgpack.Encoder().encode
_decode_logprobs = msgspec.msgpack.Decoder(Logprobs).decode
_decode_sources = msgspec.msgpack.Decoder(Sources).decode


class Answer(msgspec.Struct):
    """One choice of a request, as far as the client has it."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None  # if it has ended
    num_shown: int | None = None  # tokens that the client has; None: all, and the end
    is_end_shown: bool = False  # with `num_shown`: whether the client knows that it has ended
    logprobs: list[bytes] = []  # of each token, encoded; empty if the request asks for none

    def has_shown(self, delta: Delta) -> bool:
        """Return whether the client has a delta of this answer that comes again."""
        if self.num_shown is None:
            return True
        return delta.start < self.num_shown if delta.token_ids else self.is_end_shown

    def completed(self, echo: Delta) -> Delta:
        """Return a delta of an echo, which has one token or none, with the logprobs that its token had."""
        if not (self.logprobs and echo.token_ids):
            return echo
        return msgspec.structs.replace(echo, logprobs=_decode_logprobs(self.logprobs[echo.start]))


def answers_of(shown: ShownAnswers) -> dict[int, Answer]:
    """Return the answers of a request, by choice, as an encoded record of their tokens has them."""
    return {
        choice: Answer(each.token_ids, cast(FinishReason | None, each.finish_reason), logprobs=each.logprobs)
        for choice, each in shown.answers.items()
    }


class Shown(msgspec.Struct):
    """State that an answer has reached with a part of its body."""

    tokens: list[tuple[int, bytes]]  # (choice, token ids, encoded), beyond the parts before
    ended: list[tuple[int, FinishReason]]  # (choice, finish reason), beyond the parts before
    num_events: int  # from the start of the answer, if its events are numbered
    num_cached: int  # tokens of the prompts, of choices with tokens, that were in the prefix cache
    seed: int = 0  # of the whole request; the same in each part
    logprobs: list[tuple[int, bytes]] = []  # (choice, those of a token, encoded), if the request asks for them
    sources: list[tuple[int, bytes]] = []  # (prompt, Sources, encoded), beyond the parts before


class Continuation(msgspec.Struct):
    """Start and state of a request. A choice is position of the prompt × n + index of the answer."""

    nonce: bytes  # NONCE_BYTES random bytes
    created: float  # unix seconds of the request's first byte
    answers: dict[int, Answer] = {}  # by choice
    sources: dict[int, bytes] = {}  # by prompt: Sources, encoded, of those that have any
    new_sources: list[tuple[int, bytes]] = []  # those that no Shown has yet
    num_events: int = 0  # the last Shown's
    num_cached: int = 0  # the last Shown's
    rendered_cached: int = 0  # the next Shown's num_cached
    seed: int = 0  # the last Shown's
    is_resumed: bool = False  # whether the client has bytes of the answer
    num_losses: int = 0  # frontends lost with it since its last new token
    is_flex: bool = False  # whether its requests are of the flex class, whatever its body says
    api_key: ApiKey | None = None  # that the request carries
    is_kept: bool = False  # whether somebody reads the Shown of each part; without a reader none is made
    is_muted: bool = False  # whether the client has all that is being rendered
    rendered: list[tuple[int, Delta]] = []  # deltas by choice that no Shown has yet; only if it is kept
    report: Callable[[Shown], Awaitable[None]] | None = None  # of a whole answer: called before its bytes are made

    @property
    def was_begun(self) -> bool:
        """Whether the client has tokens."""
        return bool(self.answers)

    def take_shown(self) -> Shown:
        """Return the state that the answer reaches with a part that holds all that is rendered so far."""
        rendered = self.rendered  # once a part: hot
        self.rendered = []
        self.num_cached = self.rendered_cached
        if len(rendered) == 1 and not self.new_sources:
            choice, delta = rendered[0]
            if delta.token_ids and delta.finish_reason is None and delta.logprobs is None:
                return Shown([(choice, delta.token_ids)], [], self.num_events, self.num_cached, self.seed)
        tokens: list[tuple[int, bytes]] = []
        ended: list[tuple[int, FinishReason]] = []
        logprobs: list[tuple[int, bytes]] = []
        for choice, delta in rendered:
            if delta.token_ids:
                tokens.append((choice, delta.token_ids))
            if delta.finish_reason is not None:
                ended.append((choice, delta.finish_reason))
            if delta.logprobs is not None:
                logprobs += [(choice, _encode(each)) for each in single_tokens(delta.logprobs)]
        sources, self.new_sources = self.new_sources, []
        return Shown(tokens, ended, self.num_events, self.num_cached, self.seed, logprobs, sources)

    def note_sources(self, prompt: int, accepted: Accepted) -> None:
        """Note the sources of answers to a prompt, if the request may have to go on elsewhere."""
        if prompt in self.sources or not (self.is_kept and (accepted.adapter_digest or accepted.media_digests)):
            return
        encoded = _encode(Sources(accepted.adapter_digest, accepted.media_digests))
        self.sources[prompt] = encoded
        self.new_sources.append((prompt, encoded))

    @property
    def adapter_digest(self) -> bytes:
        """The digest of the adapter of all answers that the client has a part of; empty if there is none."""
        return next((_decode_sources(each).adapter for each in self.sources.values()), b"")

    def nothing_shown(self) -> Shown:
        """Return the state of the answer for a part that shows nothing."""
        return Shown([], [], self.num_events, self.num_cached, self.seed)

    def submits(self, given: Sequence[Submit], new_seed: Callable[[], int]) -> list[Submit]:
        """Return the submits of a request with the tokens that its client has, if the request may have to go on in
        another frontend, with seeds that are the same there. An engine that drains refuses only first attempts."""
        if not (self.is_kept or self.answers):
            return list(given)
        self.seed = self.seed or new_seed()
        seeds = random.Random(self.seed)
        found: list[Submit] = []
        for position, submit in enumerate(given):
            seed = seeds.getrandbits(63) if position else self.seed
            if submit.params.seed is None:
                submit = msgspec.structs.replace(submit, params=submit.params.replace(seed=seed))
            submit = msgspec.structs.replace(submit, attempt=self.num_losses)
            submit = self._with_sources(submit, position)
            found.append(self._with_tokens(submit, position * submit.params.n))
        return found

    def since_first_byte(self, submits: Sequence[Submit]) -> list[Submit]:
        """Return the submits of a request. If a lost frontend has begun it, it keeps its place in the queue and its
        deadline."""
        if not (self.num_losses or self.answers or self.is_resumed):
            return list(submits)
        return [msgspec.structs.replace(submit, arrival_time=self.created) for submit in submits]

    def _with_sources(self, submit: Submit, position: int) -> Submit:
        """Return a submit with the sources that its answers began with: its names may lead to others by now."""
        if not self.sources:
            return submit
        digests = _decode_sources(self.sources[position]).media if position in self.sources else []
        media = with_digests(submit.media, digests)
        return msgspec.structs.replace(submit, media=media, adapter_digest=self.adapter_digest)

    def _with_tokens(self, submit: Submit, first: int) -> Submit:
        """Return a submit with the tokens of its answers, the first of which is choice `first`."""
        num_answers, seed = submit.params.n, submit.params.seed
        if seed is None or not any(first + index in self.answers for index in range(num_answers)):
            return submit
        children: list[Child] = []
        for index in range(num_answers):
            known = self.answers.get(first + index) or Answer([])
            children.append(
                Child(
                    index=index,
                    seed=child_seed(seed, index),
                    output_token_ids=encode_ids(known.token_ids),
                    finish_reason=known.finish_reason,
                )
            )
        return msgspec.structs.replace(submit, children=children, has_echo=True)

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
