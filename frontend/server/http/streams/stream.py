"""ResumableStream: a stream that any reader can read on from a position, and Position: the part that a reader has.

A stream only grows: it has all tokens that any of its readers was shown. Its slot in the journal, if there is one, has
the request and these tokens, so that a successor of this frontend goes on with it. Knows no connections.
"""

from __future__ import annotations

import asyncio
import re
from typing import Protocol

import msgspec
from starlette.types import Scope

from .....ipc.codec import decode_ids, encode_ids
from ....forms.openai.errors import HttpError
from ....listening.journal.slot import Slot
from ...api.continuation import Answer, Continuation, Shown, answers_of

_POSITION = re.compile(r"(\d{1,9}e?(?:,\d{1,9}e?)*)(?:\.(\d{1,9}))?")


class Place(msgspec.Struct):
    """Part of one choice that a reader has."""

    num_tokens: int = 0
    has_end: bool = False


class Position(msgspec.Struct):
    """Part of a stream that a reader has. As text: the tokens of each choice, with e if it has ended, and the number of
    events."""

    places: dict[int, Place] = {}  # by choice
    num_events: int = 0

    @classmethod
    def parse(cls, text: str) -> Position:
        """Read a position. HttpError 400 if it is none."""
        found = _POSITION.fullmatch(text)
        if found is None:
            raise HttpError(400, f"after is {text!r:.80}: give the part of an event's id behind the /")
        places = {}
        for choice, place in enumerate(found[1].split(",")):
            places[choice] = Place(int(place.removesuffix("e")), place.endswith("e"))
        return cls(places, int(found[2] or 0))

    def __str__(self) -> str:
        places = [self.places.get(choice) or Place() for choice in range(max(self.places, default=0) + 1)]
        counts = ",".join(f"{place.num_tokens}{'e' * place.has_end}" for place in places)
        return f"{counts}.{self.num_events}"

    def place(self, choice: int) -> Place:
        return self.places.setdefault(choice, Place())

    def move_past(self, continuation: Continuation) -> None:
        """Add the part that a client got in another frontend, behind this position."""
        for choice, answer in continuation.answers.items():
            place = self.place(choice)
            place.num_tokens += len(answer.token_ids)
            place.has_end |= answer.finish_reason is not None
        self.num_events = max(self.num_events, continuation.num_events)


class StreamRequest(msgspec.Struct, array_like=True):
    """The request of a stream, without its connection."""

    method: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: list[tuple[bytes, bytes]]
    resume_s: float
    body: bytearray = msgspec.field(default_factory=bytearray)

    @classmethod
    def of(cls, scope: Scope, resume_s: float) -> StreamRequest:
        path, query = scope["path"], scope["query_string"]
        return cls(scope["method"], path, scope["raw_path"], query, list(scope["headers"]), resume_s)

    @property
    def scope(self) -> Scope:
        return {
            "type": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.raw_path,
            "query_string": self.query_string,
            "headers": self.headers,
        }


class StreamJournal(Protocol):
    """The part of HttpJournal that is used here."""

    def open_stream(self, request: bytes, nonce: bytes, created: float) -> Slot | None: ...


class ResumableStream(msgspec.Struct, eq=False):
    """One stream: its request, the tokens of its answer, and whether somebody reads it."""

    id: str
    request: StreamRequest
    nonce: bytes
    created: float
    answers: dict[int, Answer] = {}
    sources: dict[int, bytes] = {}
    num_cached: int = 0
    seed: int = 0
    slot: Slot | None = None
    leave: asyncio.Event = msgspec.field(default_factory=asyncio.Event)  # set: the run is to end
    done: asyncio.Event = msgspec.field(default_factory=asyncio.Event)  # set while nothing runs

    @classmethod
    def new(cls, stream_id: str, request: StreamRequest, begun: Continuation) -> ResumableStream:
        """Return the stream of a request that begins, or goes on after a loss."""
        stream = cls(stream_id, request, begun.nonce, begun.created)
        stream.answers, stream.sources = begun.answers, begun.sources
        stream.num_cached, stream.seed = begun.num_cached, begun.seed
        return stream

    @classmethod
    def restored(cls, slot: Slot, prefix: str) -> ResumableStream:
        """Return the stream that a lost frontend has left in a slot. `prefix`: begin of the ids."""
        record, shown = slot.record, slot.shown()
        begun = Continuation(nonce=record.nonce, created=record.created)
        begun.num_cached, begun.seed, begun.sources = record.num_cached, record.seed, shown.sources
        begun.answers = answers_of(shown)
        request = msgspec.msgpack.decode(slot.request(), type=StreamRequest)
        stream = cls.new(stream_id_of(begun, prefix), request, begun)
        stream.slot = slot
        stream.done.set()
        return stream

    def keep(self, journal: StreamJournal) -> None:
        """Put the request, once its body is there, and all tokens so far into the journal, if there is room."""
        if self.slot is not None:
            return
        self.slot = journal.open_stream(msgspec.msgpack.encode(self.request), self.nonce, self.created)
        if self.slot is not None and self.answers:
            self.slot.put_tokens(self._all_shown())

    def _all_shown(self) -> Shown:
        shown = Shown([], [], 0, self.num_cached, self.seed, [], list(self.sources.items()))
        for choice, answer in self.answers.items():
            shown.tokens.append((choice, encode_ids(answer.token_ids)))
            shown.logprobs += [(choice, each) for each in answer.logprobs]
            if answer.finish_reason is not None:
                shown.ended.append((choice, answer.finish_reason))
        return shown

    def add(self, shown: Shown, position: Position) -> None:
        """Add a part of the answer that a reader gets at its position, and move the position behind it. Tokens that
        another reader had before are known."""
        new = Shown([], [], shown.num_events, shown.num_cached, shown.seed)
        with_logprobs = iter(shown.logprobs)
        for choice, encoded in shown.tokens:
            place, answer = position.place(choice), self._answer(choice)
            for token_id in decode_ids(encoded):
                logprobs = next(with_logprobs, None)
                if place.num_tokens == len(answer.token_ids):
                    answer.token_ids.append(token_id)
                    new.tokens.append((choice, encode_ids((token_id,))))
                    if logprobs is not None:
                        answer.logprobs.append(logprobs[1])
                        new.logprobs.append(logprobs)
                place.num_tokens += 1
        for choice, reason in shown.ended:
            position.place(choice).has_end = True
            answer = self._answer(choice)
            if answer.finish_reason is None:
                answer.finish_reason = reason
                new.ended.append((choice, reason))
        for prompt, encoded in shown.sources:
            if self.sources.setdefault(prompt, encoded) is encoded:
                new.sources.append((prompt, encoded))
        position.num_events = shown.num_events
        self.num_cached, self.seed = shown.num_cached, shown.seed
        if self.slot is not None and (new.tokens or new.ended or new.sources):
            self.slot.put_tokens(new)

    def _answer(self, choice: int) -> Answer:
        return self.answers.setdefault(choice, Answer([]))

    @property
    def end(self) -> Position:
        """The position behind all that was shown."""
        position = Position()
        position.move_past(self._continuation())
        return position

    def check(self, position: Position) -> None:
        """Raise HttpError 400 if a position is not one of this stream."""
        for choice, place in position.places.items():
            num_tokens = len(self.answers[choice].token_ids) if choice in self.answers else 0
            if place.num_tokens > num_tokens:
                raise HttpError(400, f"the stream has {num_tokens} tokens, after is {position!s:.80}")

    def continued(self, position: Position, reader: Continuation) -> Continuation:
        """Return the continuation of a reader who has all up to a position. `reader`: that of its own request."""
        found = self._continuation()
        for choice, answer in found.answers.items():
            place = position.places.get(choice) or Place()
            answer.num_shown, answer.is_end_shown = place.num_tokens, place.has_end
        found.num_events, found.is_kept = position.num_events, True
        found.is_resumed, found.num_losses = reader.is_resumed, reader.num_losses
        return found

    def _continuation(self) -> Continuation:
        answers = {
            choice: Answer(list(each.token_ids), each.finish_reason, logprobs=list(each.logprobs))
            for choice, each in self.answers.items()
            if each.token_ids or each.finish_reason
        }
        found = Continuation(nonce=self.nonce, created=self.created, answers=answers, sources=dict(self.sources))
        found.num_cached, found.seed = self.num_cached, self.seed
        return found


def stream_id_of(begun: Continuation, prefix: str) -> str:
    """Return the id of the stream of a request."""
    return prefix + begun.digits("stream")
