"""A reader of a resumable stream may leave and come back at any event: it gets every event once."""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenloom.frontend.server.api.continuation import SHOWN, Continuation, working_on
from tokenloom.frontend.server.http.streams import resumable
from tokenloom.tests.frontend.server.api.cut_answers import CutApp, Part, continuation_of, some_turns, texts_of
from tokenloom.tests.frontend.server.api.test_continuation import ASKS, FORM, SCRIPTS
from tokenloom.tests.frontend.server.http.served_app import DEADLINE_S, serving
from tokenloom.tests.support.in_loop import in_loop
from tokenloom.tests.support.today import seeds

NAMES = [
    *("completions", "chats with calls", "chat with thoughts", "response with calls", "message with calls"),
    *("completion with logprobs", "response with logprobs"),
]
# their choices may be in another order, or the last token and the end in two events
AS_TEXTS = ("completions", "chats with calls", "completion with logprobs")
_ID = re.compile(rb"^id: (.*)\n", re.MULTILINE)


class Reader:
    """A client that reads `num_parts` parts of an answer and then leaves; None: all."""

    def __init__(self, served: CutApp, num_parts: int | None = None) -> None:
        self._served, self._num_parts = served, num_parts
        self.parts: list[bytes] = []
        self.sent: list[Part] = []  # with the tokens that they show
        self.head: dict[bytes, bytes] = {}
        self.status = 0
        self._left = asyncio.Event()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.head = message["status"], dict(message["headers"])
        elif not self._left.is_set():
            self.parts.append(message.get("body", b""))
            self.sent.append(Part(self.parts[-1], message.get(SHOWN)))
            if len(self.parts) == self._num_parts:
                self._left.set()

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> asyncio.Task[None]:
        """Start a request and return it, once this reader has left or has got all."""
        messages = deque([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            if messages:
                return messages.popleft()
            await self._left.wait()
            return {"type": "http.disconnect"}

        path, _, query = path.partition("?")
        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode()}
        scope |= {"query_string": query.encode(), "headers": given, "client": ("c", 1)}
        task = asyncio.ensure_future(self._served.app(scope, receive, self.send))  # type: ignore[arg-type]
        leaving = asyncio.ensure_future(self._left.wait())
        await asyncio.wait((task, leaving), timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        return task

    async def post(self, name: str, begun: Continuation | None = None, **headers: str) -> asyncio.Task[None]:
        """Start a request for a stream; `begun`: of an earlier frontend."""
        path, fields = ASKS[name]
        body = json.dumps({**fields, "stream": True, "seed": 3}).encode()
        with working_on(begun or continuation_of([])):
            return await self.ask("POST", path, body, **headers)

    @property
    def has_id(self) -> bool:
        return bool(_ID.search(b"".join(self.parts)))

    @property
    def last_id(self) -> str:
        """The id of the last event that has one."""
        found = _ID.findall(b"".join(self.parts))
        return found[-1].decode() if found else f"{self.head[b'x-stream-id'].decode()}/0.0"

    @property
    def events(self) -> bytes:
        return _ID.sub(b"", b"".join(self.parts))


def _serving(folder: Path) -> Any:
    return serving(lambda: CutApp(folder, SCRIPTS, FORM))


@pytest.mark.parametrize("name", NAMES)
@in_loop(_serving)
async def test_a_reader_that_leaves_after_any_event_gets_the_rest(served: CutApp, name: str) -> None:
    calm = Reader(served)
    await calm.post(name)
    assert not _ID.search(calm.events) and len(calm.parts) > 9
    for num_parts in range(1, len(calm.parts), 4):
        served.streams.by_id.clear()  # all have the same nonce
        first = Reader(served, num_parts)
        task = await first.post(name, x_stream_resume="60")
        rest = Reader(served)
        await rest.ask("GET", f"/v1/streams/{first.last_id.partition('/')[0]}", last_event_id=first.last_id)
        events = first.events + rest.events
        assert texts_of(events) == texts_of(calm.events), f"left after {num_parts} parts"
        assert name in AS_TEXTS or events == calm.events
        assert rest.last_id.endswith("/end")
        await asyncio.wait_for(task, DEADLINE_S)


@pytest.mark.parametrize("seed", seeds(1, 20))
@in_loop(_serving)
async def test_a_reader_that_comes_and_goes_reads_each_text_once(served: CutApp, seed: int) -> None:
    calm = Reader(served)
    await calm.post("response with calls")
    served.tokens_per_turn = some_turns(seed)
    reader = Reader(served, 1)
    await reader.post("response with calls", x_stream_resume="60")
    events, last_id = reader.events, reader.last_id
    while not last_id.endswith("/end"):
        stream_id, _, position = last_id.partition("/")
        reader = Reader(served, 2)
        await reader.ask("GET", f"/v1/streams/{stream_id}?after={position}")
        assert reader.status == 200
        events, last_id = events + reader.events, reader.last_id
    assert texts_of(events) == texts_of(calm.events)


@in_loop(_serving)
async def test_a_second_reader_takes_the_stream_from_the_first(served: CutApp) -> None:
    first, second = Reader(served), Reader(served)
    task = asyncio.ensure_future(first.post("chat", x_stream_resume="60"))
    await _until(lambda: len(first.parts) > 2)
    await second.ask("GET", f"/v1/streams/{first.head[b'x-stream-id'].decode()}")
    await asyncio.wait_for(task, DEADLINE_S)
    assert first.parts[-1] == b"", "its body is complete, without the events that the second has"
    assert second.events.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"stop"' in second.events


@in_loop(_serving)
async def test_a_stream_that_is_deleted_or_whose_time_is_over_ends_on_the_engine(served: CutApp) -> None:
    for ends in ("deleted", "over"):
        first = Reader(served, 2)
        task = await first.post("chat", x_stream_resume="60" if ends == "deleted" else "0.001")
        stream = f"/v1/streams/{first.head[b'x-stream-id'].decode()}"
        if ends == "deleted":
            answer = Reader(served)
            await answer.ask("DELETE", stream)
            assert json.loads(b"".join(answer.parts))["deleted"] is True
        await asyncio.wait_for(task, DEADLINE_S)
        await _until(lambda: served.frontend.num_open_requests == 0)
        answer = Reader(served)
        await answer.ask("GET", stream)
        assert answer.status == 404


@in_loop(_serving)
async def test_of_too_many_detached_streams_the_oldest_goes(served: CutApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MAX_DETACHED", 2)
    readers = [Reader(served, 2) for _ in range(4)]
    for number, reader in enumerate(readers):
        path, fields = ASKS["chat"]
        body = json.dumps({**fields, "stream": True, "request_id": f"{number}"}).encode()
        await reader.ask("POST", path, body, x_stream_resume="60")
    found = []
    for reader in readers:
        rest = Reader(served, 1)
        await rest.ask("GET", f"/v1/streams/{reader.head[b'x-stream-id'].decode()}")
        found.append(rest.status)
    assert found == [404, 404, 200, 200]


@pytest.mark.parametrize("given", ["0", "-1", "601", "nan", "soon"])
@in_loop(_serving)
async def test_a_time_must_be_seconds_up_to_ten_minutes(served: CutApp, given: str) -> None:
    reader = Reader(served)
    await reader.post("chat", x_stream_resume=given)
    assert reader.status == 400 and b"x-stream-resume" in reader.parts[0]


@in_loop(_serving)
async def test_a_position_must_be_one_of_the_stream(served: CutApp) -> None:
    first = Reader(served, 2)
    await first.post("chat", x_stream_resume="60")
    for after in ("9999.3", "x", "1,,2", "-1"):
        reader = Reader(served)
        await reader.ask("GET", f"/v1/streams/{first.head[b'x-stream-id'].decode()}?after={after}")
        assert reader.status == 400
    rest = Reader(served)
    await rest.ask("GET", f"/v1/streams/{first.head[b'x-stream-id'].decode()}", last_event_id=first.last_id)
    assert rest.events.endswith(b"data: [DONE]\n\n"), "a wrong position takes the stream from nobody"


@pytest.mark.parametrize("stream_id", ["0-x", "²-x", "9" * 5000 + "-x"])
@in_loop(_serving)
async def test_an_unknown_stream_is_not_found(served: CutApp, stream_id: str) -> None:
    reader = Reader(served)
    await reader.ask("GET", f"/v1/streams/{stream_id}")
    assert reader.status == 404


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)
