"""ResumableStreams: event streams that go on after their clients have left, and from which any client can read on.

A POST with the header x-stream-resume: SECONDS gets a stream with ids of events: STREAM/POSITION, where the position
says how many tokens of each choice the events so far show. If its client leaves, the answer is generated further for
that time. A reader with a position gets the rest: the request is run again from the tokens of the answer, as in another
frontend, and the part before the position is not sent. No event is stored. A successor of this frontend goes on with
the streams, whether they have a reader or not. Knows no fields of bodies.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....forms.openai.errors import HttpError
from ....listening.journal.journal import HttpJournal
from ....listening.journal.record import MAX_LOSSES, Reason
from ....listening.journal.slot import Slot
from ...api.continuation import Continuation, current, working_on
from ...api.openai.events import SERVER_SEND
from .reader import StreamReader
from .stream import Position, ResumableStream, StreamRequest, stream_id_of

RESUME_HEADER = b"x-stream-resume"
MAX_RESUME_S = 600.0
MAX_DETACHED = 256  # streams without a client; the one without for the longest goes first
_Run = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]
_NO_CONNECTION: Scope = {
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "http_version": "1.1",
    "scheme": "http",
    "server": None,
    "client": None,
    "root_path": "",
}


class ResumableStreams:
    """ASGI app around another one, and owner of the streams."""

    def __init__(self, prefix: str = "", journal: HttpJournal | None = None) -> None:
        """`prefix`: begin of the ids of all streams. `journal`: keeps them for a successor; None: they end with this
        frontend."""
        self._prefix, self._journal = prefix, journal
        self.by_id: dict[str, ResumableStream] = {}
        self._detached: dict[ResumableStream, asyncio.TimerHandle] = {}  # in the order in which their clients left
        self._alone: set[asyncio.Task[None]] = set()  # runs without a client

    def around(self, app: _Run) -> ResumableStreams:
        """Answer requests by `app`."""
        self._app = app
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(RESUME_HEADER) if scope["type"] == "http" else None
        if given is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        begun = current()
        stream = self.by_id.get(stream_id_of(begun, self._prefix))
        is_first = stream is None
        if stream is None:
            request = StreamRequest.of(scope, _seconds(given))
            stream = ResumableStream.new(stream_id_of(begun, self._prefix), request, begun)
        else:
            await self._take(stream)
        position = Position()
        position.move_past(begun)
        await self._run(stream, position, begun, scope, receive, send, is_first=is_first)

    async def read(
        self, stream: ResumableStream, position: Position, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer the request of `scope` with the events of a stream after a position, in place of its present
        reader."""
        await self._take(stream)
        reader = current()
        position.move_past(reader)
        again = {**scope, **stream.request.scope}
        again.pop("path_params", None)
        receive_body = _body_before(stream.request.body, receive)
        await self._run(stream, position, reader, again, receive_body, send, is_first=False)

    async def delete(self, stream: ResumableStream) -> None:
        """End a stream and forget it."""
        self._forget(stream)
        await stream.done.wait()

    # ── runs ──

    async def _take(self, stream: ResumableStream) -> None:
        """End the present run of a stream, for another one that begins at once. Of several that want it, each ends the
        one before."""
        while not stream.done.is_set():
            stream.leave.set()
            await stream.done.wait()
        self._attach(stream)
        stream.leave.clear()
        stream.done.clear()

    async def _run(
        self,
        stream: ResumableStream,
        position: Position,
        reader: Continuation,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        is_first: bool,
    ) -> None:
        connection = StreamReader(
            stream, position, receive, send, scope[SERVER_SEND], self._keep, self._detach, is_first=is_first
        )
        self.by_id[stream.id] = stream
        try:
            with working_on(stream.continued(position, reader)):
                await self._app({**scope, SERVER_SEND: connection.send_part}, connection.receive, connection.send)
            await connection.close()
        finally:
            stream.done.set()
            if is_first and not connection.is_stream:  # refused
                self._forget(stream)
            else:
                self._detach(stream)  # its client may not have got the last events

    def _keep(self, stream: ResumableStream) -> None:
        if self._journal is not None and self.by_id.get(stream.id) is stream:
            stream.keep(self._journal)

    def _detach(self, stream: ResumableStream) -> None:
        """Keep a stream that has no client for its time."""
        if stream in self._detached or self.by_id.get(stream.id) is not stream:
            return
        loop = asyncio.get_running_loop()
        self._detached[stream] = loop.call_later(stream.request.resume_s, self._forget, stream)
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
        if stream.slot is not None and self._journal is not None:
            self._journal.free_slot(stream.slot)
            stream.slot = None

    # ── a successor ──

    def restore(self) -> None:
        """Take the streams that a lost frontend has left, before connections are adopted: their clients may be among
        these."""
        if self._journal is None:
            return
        for slot in self._journal.stream_slots():
            reason = self._reason_to_cut(slot, self._journal)
            if reason is not Reason.NONE:
                self._journal.count_cut(reason)
                self._journal.free_slot(slot)
                continue
            stream = ResumableStream.restored(slot, self._prefix)
            self.by_id[stream.id] = stream
            self._detach(stream)

    @staticmethod
    def _reason_to_cut(slot: Slot, journal: HttpJournal) -> Reason:
        if not journal.is_of_this_version(slot):
            return Reason.VERSION
        return Reason.LOST_OFTEN if slot.record.losses >= MAX_LOSSES else Reason.NONE

    def go_on(self, app: ASGIApp) -> None:
        """Run the restored streams that no adopted connection reads, by `app`, the whole server's."""
        for stream in self.by_id.values():
            if stream.slot is not None and stream.done.is_set():
                task = asyncio.ensure_future(self._run_alone(stream, stream.slot, app))
                self._alone.add(task)
                task.add_done_callback(self._alone.discard)

    async def _run_alone(self, stream: ResumableStream, slot: Slot, app: ASGIApp) -> None:
        slot.count_loss()
        if self._journal is not None:
            self._journal.count_resumed()
        begun = stream.continued(stream.end, Continuation(stream.nonce, stream.created, num_losses=slot.record.losses))
        begun.is_resumed = True
        client = _NoClient()
        receive = _body_before(stream.request.body, client.receive)
        with working_on(begun):
            await app({**_NO_CONNECTION, **stream.request.scope}, receive, client.send)


class _NoClient:
    """The client of a run that nobody reads: it leaves when the answer begins."""

    def __init__(self) -> None:
        self._has_head = asyncio.Event()

    async def receive(self) -> Message:
        await self._has_head.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self._has_head.set()


def _body_before(body: bytearray, receive: Receive) -> Receive:
    """Return a function that receives a body, and then from `receive`."""
    chunks = [bytes(body)]

    async def receive_body() -> Message:
        if chunks:
            return {"type": "http.request", "body": chunks.pop(), "more_body": False}
        return await receive()

    return receive_body


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
