"""The app of a frontend and its clients, without sockets; the test is the core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx2
import openai
from starlette.types import ASGIApp, Message

from tokenloom.frontend.listening.journal.journal import HttpJournal
from tokenloom.frontend.server.api.openai.local_engine import LocalEngine
from tokenloom.frontend.server.http.access_log import AccessLog
from tokenloom.frontend.server.http.app import GeneratingEndpoints, new_app
from tokenloom.frontend.server.http.peers import Peers
from tokenloom.frontend.server.http.streams.resumable import ResumableStreams
from tokenloom.frontend.server.requests.frontend import Frontend
from tokenloom.frontend.server.requests.media.media_input import MediaInput
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.frontend.state.database import Database
from tokenloom.frontend.state.responses import ResponseStore
from tokenloom.ipc.messages.base import PROTOCOL_VERSION, Welcome
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.tests.frontend.bench import TOKENIZER

DEADLINE_S = 30.0
CHUNK_BYTES = 64 << 10  # of a body, as uvicorn receives it
KEY = "sk-loom"


class ServedApp:
    """`http` and `client`, OpenAI's, call the app. Tests play the core in `turn`."""

    def __init__(
        self,
        spec: EngineSpec,
        template: ChatTemplate,
        media: MediaInput | None = None,
        journal: HttpJournal | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.frontend = Frontend(spec, TOKENIZER, template, lambda: self.loop.call_soon_threadsafe(self.turn), media)
        self.frontend.connect()
        self.frontend.on_core_message(Welcome(protocol_version=PROTOCOL_VERSION, run_id=spec.run_id))
        engine = LocalEngine(self.frontend, lambda: self.loop.call_soon(self.turn))
        peers = Peers(spec, 0)
        store = ResponseStore(Database.of_engine(spec), spec.config)
        self.generating = GeneratingEndpoints(engine, self.frontend.metrics, spec, store, peers)
        self.streams = ResumableStreams("0-", journal)
        app = new_app(engine, self.frontend, spec, self.generating.endpoints(), peers, self.streams)
        self.app = AccessLog(app, has_all=True)
        headers = {"authorization": f"Bearer {KEY}"}
        self.http = httpx2.AsyncClient(transport=AppTransport(self.app), base_url="http://app", headers=headers)
        self.client = openai.AsyncOpenAI(base_url="http://app/v1", api_key=KEY, max_retries=0, http_client=self.http)

    def turn(self) -> None:
        """Take the messages to the core and answer them."""
        raise NotImplementedError

    def messages_to_core(self) -> list[Any]:
        self.frontend.on_wakeup()
        self.frontend.tick(self.loop.time())
        messages = self.frontend.outbox.to_cores[0].copy()
        self.frontend.outbox.to_cores[0].clear()
        return messages

    async def close(self) -> None:
        self.frontend.stop("the test ends")
        await self.http.aclose()


Served = TypeVar("Served", bound=ServedApp)


@asynccontextmanager
async def serving(new_app: Callable[[], Served]) -> AsyncIterator[Served]:
    """Make an app in the loop, for a test that ends in time, and close it."""
    served = new_app()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield served
    finally:
        await served.close()


class AppTransport(httpx2.AsyncBaseTransport):
    """Calls an app without sockets, and gives its answer out as it comes. Closing an answer disconnects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body, headers = await request.aread(), [(name.lower(), value) for name, value in request.headers.raw]
        url = request.url
        scope = {"type": "http", "method": request.method, "path": url.path, "raw_path": url.raw_path}
        scope |= {"query_string": url.query, "headers": headers, "client": ("c", 1)}
        places = iter(range(0, max(len(body), 1), CHUNK_BYTES))
        stream = AppStream()

        async def receive() -> Message:
            await asyncio.sleep(0)  # a chunk a turn, as from a socket
            if (place := next(places, None)) is None:
                await stream.closed.wait()
                return {"type": "http.disconnect"}
            end = place + CHUNK_BYTES
            return {"type": "http.request", "body": body[place:end], "more_body": end < len(body)}

        stream.start(self._app(scope, receive, stream.send))  # type: ignore[arg-type]
        try:
            start = await stream.next()
        except asyncio.CancelledError:
            await stream.aclose()
            raise
        return httpx2.Response(start["status"], headers=start["headers"], stream=stream)


class AppStream(httpx2.AsyncByteStream):
    """The body of an app's answer."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self._has_more = True
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()  # None: the app has ended

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.task = asyncio.ensure_future(work)
        self.task.add_done_callback(lambda _: self._messages.put_nowait(None))

    async def send(self, message: Message) -> None:
        self._messages.put_nowait(message)

    async def next(self) -> Message:
        """Return the next message of the app; its error if it ends without one."""
        if (message := await self._messages.get()) is None:
            self.task.result()
            raise AssertionError("the app ended amid its answer")
        return message

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._has_more:
            message = await self.next()
            self._has_more = message.get("more_body", False)
            yield message.get("body", b"")

    async def aclose(self) -> None:
        self.closed.set()
        await asyncio.wait_for(self.task, DEADLINE_S)
