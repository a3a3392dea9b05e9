"""ResumableStreams: event streams that go on after their clients have left, and from which any client can read on.

A POST with the header x-stream-resume: SECONDS gets a stream with ids of events: STREAM/POSITION, where the position
says how many tokens of each choice the events so far show. If its client leaves, the answer is generated further for
that time. A reader with a position gets the rest: the request is run again from the tokens of the answer, as in another
frontend, and the part before the position is not sent. No event is stored. Knows no fields of bodies.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from ....forms.openai.errors import HttpError
from ...api.continuation import SHOWN, Answer, Continuation, Shown, current, working_on
from ...api.openai.events import SERVER_SEND

RESUME_HEADER = b"x-stream-resume"
ID_HEADER = b"x-stream-id"
MAX_RESUME_S = 600.0
MAX_DETACHED = 256  # streams without a client; the one without for the longest goes first
END = "end"  # position after the last event
_POSITION = re.compile(r"(\d{1,9}e?(?:,\d{1,9}e?)*)(?:\.(\d{1,9}))?")
_Run = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]


class ResumableStream(msgspec.Struct, eq=False):
    """One stream: its request, the tokens of its answer, and whether somebody reads it."""

    id: str
    scope: Scope  # of the request, without its connection
    resume_s: float
    continuation: Continuation  # as the request began
    body: bytearray = msgspec.field(default_factory=bytearray)
    answers: dict[int, Answer] = msgspec.field(default_factory=dict)
    last: Shown = msgspec.field(default_factory=lambda: Shown([], [], 0, 0))
    is_over: bool = False  # the last part was sent
    leave: asyncio.Event = msgspec.field(default_factory=asyncio.Event)  # set: the run is to end
    done: asyncio.Event = msgspec.field(default_factory=asyncio.Event)  # set while nothing runs

    def add(self, shown: Shown) -> str:
        """Add a part of the answer; return the position after it."""
        for choice, token_id in shown.tokens:
            self._answer(choice).token_ids.append(token_id)
        for choice, logprobs in shown.logprobs:
            self._answer(choice).logprobs.append(logprobs)
        for choice, reason in shown.ended:
            self._answer(choice).finish_reason = reason
        self.last = shown
        return self.position

    def show(self, continuation: Continuation) -> None:
        """Begin with the parts that a client has."""
        self.answers = {
            choice: Answer(
                each.token_ids[: each.num_shown],
                each.finish_reason if each.num_shown is None else None,
                logprobs=each.logprobs[: each.num_shown],
            )
            for choice, each in continuation.answers.items()
        }
        for choice, each in continuation.answers.items():
            if each.is_end_shown:
                self.answers[choice].finish_reason = each.finish_reason
        self.last = Shown([], [], continuation.num_events, continuation.num_cached, continuation.seed)

    @property
    def position(self) -> str:
        """The position after all that was shown: tokens of each choice, with e if it has ended, and events."""
        shown = [self.answers.get(choice) or Answer([]) for choice in range(max(self.answers, default=0) + 1)]
        counts = ",".join(f"{len(each.token_ids)}{'e' * (each.finish_reason is not None)}" for each in shown)
        return f"{counts}.{self.last.num_events}"

    def _answer(self, choice: int) -> Answer:
        return self.answers.setdefault(choice, Answer([]))

    def continued(self, position: str) -> Continuation:
        """Return the continuation of a reader who has all up to a position. HttpError 400 if it is not a position of
        this stream."""
        found = _POSITION.fullmatch(position)
        places = found[1].split(",") if found else []
        answers = {choice: msgspec.structs.replace(each) for choice, each in self.answers.items()}
        for choice, place in enumerate(places):
            num_shown = int(place.removesuffix("e"))
            answer = answers.setdefault(choice, Answer([]))
            if num_shown > len(answer.token_ids):
                raise HttpError(400, f"the stream has {len(answer.token_ids)} tokens, after is {position:.80}")
            answer.num_shown, answer.is_end_shown = num_shown, place.endswith("e")
        if found is None:
            raise HttpError(400, f"after is {position!r:.80}: give the part of an event's id behind the /")
        for choice, answer in answers.items():
            if choice >= len(places):
                answer.num_shown = 0
        begun = self.continuation
        return Continuation(
            nonce=begun.nonce,
            created=begun.created,
            answers={choice: each for choice, each in answers.items() if each.token_ids or each.finish_reason},
            num_events=int(found[2] or 0),
            num_cached=self.last.num_cached,
            seed=self.last.seed,
            is_kept=True,
        )


class ResumableStreams:
    """ASGI app around `app`, and owner of the streams."""

    def __init__(self, app: _Run, prefix: str = "") -> None:
        """`prefix`: begin of the ids of all streams."""
        self._app, self._prefix = app, prefix
        self.by_id: dict[str, ResumableStream] = {}
        self._detached: dict[ResumableStream, asyncio.TimerHandle] = {}  # in the order in which their clients left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(RESUME_HEADER) if scope["type"] == "http" else None
        if given is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        continuation = current()
        stream_id = self._prefix + continuation.digits("stream")
        kept = {name: scope[name] for name in ("type", "method", "path", "raw_path", "query_string", "headers")}
        stream = ResumableStream(stream_id, kept, _seconds(given), continuation)
        stream.show(continuation)
        continuation.is_kept = True
        await self._run(stream, scope, receive, send)

    async def read(self, stream: ResumableStream, position: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request of `scope` with the events of a stream after a position, in place of its present
        reader."""
        await self._stop(stream)
        continuation = stream.continued(position)
        chunks = [bytes(stream.body)]

        async def receive_body() -> Message:
            if chunks:
                return {"type": "http.request", "body": chunks.pop(), "more_body": False}
            return await receive()

        stream.show(continuation)
        again = {**scope, **stream.scope}
        again.pop("path_params", None)
        with working_on(continuation):
            await self._run(stream, again, receive_body, send, is_first=False)

    async def delete(self, stream: ResumableStream) -> None:
        """End a stream and forget it."""
        self.by_id.pop(stream.id, None)
        await self._stop(stream)

    async def _stop(self, stream: ResumableStream) -> None:
        stream.leave.set()
        await stream.done.wait()
        self._attach(stream)
        stream.leave.clear()

    async def _run(
        self, stream: ResumableStream, scope: Scope, receive: Receive, send: Send, *, is_first: bool = True
    ) -> None:
        connection = _Connection(stream, receive, send, scope[SERVER_SEND], self._detach, is_first=is_first)
        self.by_id[stream.id] = stream
        stream.done.clear()
        try:
            await self._app({**scope, SERVER_SEND: connection.send_part}, connection.receive, connection.send)
            await connection.close()
        finally:
            stream.done.set()
            if connection.is_stream and self.by_id.get(stream.id) is stream:
                self._detach(stream)  # its client may not have got the last events
            else:
                self._forget(stream)

    def _detach(self, stream: ResumableStream) -> None:
        """Keep a stream that has no client for its time."""
        if stream in self._detached or stream.leave.is_set():
            return
        loop = asyncio.get_running_loop()
        self._detached[stream] = loop.call_later(stream.resume_s, self._forget, stream)
        if len(self._detached) > MAX_DETACHED:
            self._forget(next(iter(self._detached)))

    def _attach(self, stream: ResumableStream) -> None:
        timer = self._detached.pop(stream, None)
        if timer is not None:
            timer.cancel()

    def _forget(self, stream: ResumableStream) -> None:
        self._attach(stream)
        self.by_id.pop(stream.id, None)
        stream.leave.set()


class _Connection:
    """The reader of a stream: it gets the parts with ids; the run does not notice that it leaves."""

    def __init__(
        self,
        stream: ResumableStream,
        receive: Receive,
        send: Send,
        send_part: Send,
        on_left: Callable[[ResumableStream], None],
        *,
        is_first: bool,
    ) -> None:
        self._stream, self._receive, self._send, self._send_part = stream, receive, send, send_part
        self._on_left, self._is_first = on_left, is_first
        self.is_stream = False
        self._has_ended = False

    async def receive(self) -> Message:
        """Receive the body; the client's leaving only once the stream is to end."""
        leaving = asyncio.ensure_future(self._stream.leave.wait())
        message = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait((leaving, message), return_when=asyncio.FIRST_COMPLETED)
            if not message.done():
                return {"type": "http.disconnect"}
            received = message.result()
            if received["type"] == "http.request" and self._is_first:
                self._stream.body += received.get("body", b"")
            if received["type"] == "http.disconnect" and self.is_stream:
                self._on_left(self._stream)
                await leaving
            return received
        finally:
            leaving.cancel()
            message.cancel()

    async def send(self, message: Message) -> None:
        """Send the head, and answers that are no event streams as they are."""
        if message["type"] == "http.response.start":
            headers = dict(message.get("headers", ()))
            self.is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            if self.is_stream:
                message["headers"] = [*message["headers"], (ID_HEADER, self._stream.id.encode())]
        await self._send(message)

    async def send_part(self, message: Message) -> None:
        """Send a part of the stream; its last event gets the position as its id."""
        shown: Shown | None = message.get(SHOWN)
        if shown is not None:
            is_new = bool(shown.tokens or shown.ended or shown.num_events > self._stream.last.num_events)
            has_events = is_new or not message["more_body"]
            position = self._stream.add(shown)
            if not message["more_body"]:
                position = END
                self._stream.is_over = self._has_ended = True
            if has_events:
                message = {**message, "body": _with_id(message["body"], f"{self._stream.id}/{position}")}
        await self._send_part(message)

    async def close(self) -> None:
        """End the body of a reader whose stream goes on elsewhere."""
        if self.is_stream and not self._has_ended:
            await self._send_part({"type": "http.response.body", "body": b"", "more_body": False})


def _with_id(part: bytes, event_id: str) -> bytes:
    """Return events, the last one with an id."""
    if not part:
        return part
    start = part.rfind(b"\n\n", 0, -2) + 2 if part.count(b"\n\n") > 1 else 0
    return b"%bid: %b\n%b" % (part[:start], event_id.encode(), part[start:])


def _seconds(given: bytes) -> float:
    """Return the seconds in the header. HttpError 400 if it has none."""
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_RESUME_S:
        shown = given.decode(errors="replace")
        raise HttpError(400, f"x-stream-resume is {shown:.40}: give seconds up to {MAX_RESUME_S:g}")
    return seconds
