"""A silent stream sends comments, head first; a client that does not read gets one, and other streams none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tokenloom.frontend.server.api.continuation import Continuation, working_on
from tokenloom.frontend.server.api.keep_alive import COMMENT, KEEP_ALIVE, KeepAlive
from tokenloom.frontend.server.api.openai.events import DONE, EventStream
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.errors import Overloaded
from tokenloom.ipc.messages.client import Delta

DEADLINE_S = 20.0
EVENT = b"data: 1\n\n"


class Client:
    """Reader of a stream of `num_silent` fills, an event, more fills and the end."""

    def __init__(self, interval_s: float, num_silent: int, error: Exception | None = None) -> None:
        self.keep_alive = KeepAlive(interval_s)
        self.num_silent, self.error = num_silent, error
        self.messages: list[Any] = []
        self.has_arrived = asyncio.Condition()
        self.may_read = asyncio.Event()
        self.may_read.set()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        for number in (1, 2):
            num_fills = number * self.num_silent
            while self.bodies.count(COMMENT) < num_fills:
                async with self.has_arrived:
                    await self.has_arrived.wait()
            if self.error is not None:
                raise self.error
            yield EVENT

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages if message["type"] == "http.response.body"]

    async def send(self, message: Any) -> None:
        await self.may_read.wait()
        async with self.has_arrived:
            self.messages.append(message)
            self.has_arrived.notify_all()

    async def read(self) -> list[bytes]:
        async def receive() -> Any:
            await asyncio.Event().wait()

        async with asyncio.timeout(DEADLINE_S):
            scope = {"type": "http", KEEP_ALIVE: self.keep_alive}
            await EventStream(self.chunks(), lambda: DONE)(scope, receive, self.send)
        return self.bodies


def test_a_silent_stream_sends_its_head_and_comments_until_it_has_an_event() -> None:
    async def work() -> None:
        client = Client(0.003, 3)
        bodies = await client.read()
        assert [message["type"] for message in client.messages].index("http.response.start") == 0
        assert bodies.count(COMMENT) >= 6 and bodies.index(EVENT) >= 3
        assert [body for body in bodies if body != COMMENT] == [EVENT, EVENT, DONE]

    asyncio.run(work())


def test_without_an_interval_and_without_silence_nothing_is_sent_but_the_events() -> None:
    for interval_s in (0.0, 60.0):
        assert asyncio.run(Client(interval_s, 0).read()) == [EVENT, EVENT, DONE]


def test_an_error_after_the_first_comment_is_an_event() -> None:
    with pytest.raises(Overloaded):
        asyncio.run(Client(0.0, 0, Overloaded("no room", 1.0)).read())
    *comments, failure = asyncio.run(Client(0.003, 1, Overloaded("no room", 1.0)).read())
    assert set(comments) == {COMMENT} and b"no room" in failure and failure.endswith(DONE)


def test_a_comment_shows_nothing() -> None:
    async def work() -> None:
        continuation = Continuation(nonce=b"n", created=0.0, is_kept=True)
        client = Client(0.003, 1)
        with working_on(continuation):
            continuation.rendered.append((0, Delta(request_id="r", token_ids=encode_ids([7]), finish_reason="stop")))
            await client.read()
        shown = [message["shown"] for message in client.messages if message["type"] == "http.response.body"]
        first = client.bodies.index(EVENT)
        assert [bool(each.tokens or each.ended) for each in shown] == [i == first for i in range(len(shown))]
        assert (shown[first].tokens, shown[first].ended) == ([(0, encode_ids([7]))], [(0, "stop")])

    asyncio.run(work())


def test_a_client_that_does_not_read_has_one_comment_waiting() -> None:
    async def work() -> None:
        client = Client(0.003, 1)
        reading = asyncio.ensure_future(client.read())
        async with client.has_arrived:
            await client.has_arrived.wait_for(lambda: COMMENT in client.bodies)
        client.may_read.clear()
        (stream,) = client.keep_alive._num_seen
        fills = set()
        for _ in range(9):  # the timer looks
            client.keep_alive._look()
            fills |= {client.keep_alive._fills[stream]}
            await asyncio.sleep(0)
        assert len(fills) <= 2, "one that was sent, and one that waits"
        client.may_read.set()
        await reading
        assert client.keep_alive._num_seen == client.keep_alive._fills == {}

    asyncio.run(work())
