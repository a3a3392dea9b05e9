"""Nothing of a refused, failed or cancelled request stays in memory, though the garbage collector does not run."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from starlette.types import Message, Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.frontend.server.api.openai.local_engine import LocalEngine
from tokenloom.frontend.server.http.access_log import AccessLog
from tokenloom.frontend.server.http.app import GeneratingEndpoints, new_app
from tokenloom.frontend.server.http.peers import Peers
from tokenloom.frontend.server.http.streams.resumable import ResumableStreams
from tokenloom.frontend.state.database import Database
from tokenloom.frontend.state.responses import ResponseStore
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.core import EngineCoreOutputs, Finished
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.scripts.bench.engine_steps import new_frontend, submitted_keys
from tokenloom.tests.frontend.server.http.rig import GET, Server, run

DEADLINE_S = 30.0
KEY = "sk-loom"
MAX_BODY_BYTES = 1 << 16
NUM_REQUESTS = 20
CONFIG = EngineConfig(model=str(DEMO_FOLDER), api_key=[KEY], max_body_bytes=MAX_BODY_BYTES)


class Ask(NamedTuple):
    """A request, and the status that it gets; 0 if the client leaves before."""

    status: int
    path: str = "/v1/completions"
    body: Any = b""
    headers: tuple[tuple[bytes, bytes], ...] = ((b"authorization", b"Bearer sk-loom"),)
    leaves_after: int | None = None  # messages of the body


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


PROMPT = {"prompt": "hi", "max_tokens": 4}
ASKS = {
    "no key": Ask(401, headers=()),
    "wrong key": Ask(401, headers=((b"authorization", b"Bearer no"),)),
    "no key for messages": Ask(401, "/v1/messages", headers=()),
    "path": Ask(404, "/v1/nothing"),
    "method": Ask(405, "/metrics", b"x"),
    "length": Ask(413, headers=((b"content-length", b"999999999"), (b"authorization", b"Bearer sk-loom"))),
    "size": Ask(413, body=b"[" * (MAX_BODY_BYTES + 1)),
    "coding": Ask(415, headers=((b"content-encoding", b"gzip"), (b"authorization", b"Bearer sk-loom"))),
    "empty": Ask(400),
    "no JSON": Ask(400, body=b"{'"),
    "not UTF-8": Ask(400, body=b'{"prompt": "\xff"}'),
    "deep": Ask(400, body=b'{"prompt": ' + b"[" * 20_000),
    "type": Ask(400, body={"prompt": "hi", "n": "x"}),
    "value": Ask(400, body={"prompt": "hi", "temperature": 1e9}),
    "model": Ask(404, body={"prompt": "hi", "model": "none"}),
    "long prompt": Ask(400, body={"prompt": "hi " * 20_000}),
    "vocabulary": Ask(400, body={"prompt": [1 << 30]}),
    "schema": Ask(400, body={**PROMPT, "structured_outputs": {"json": "[" * 200}}),
    "template": Ask(400, "/v1/chat/completions", chat(chat_template="{{")),
    "messages": Ask(400, "/v1/chat/completions", {"messages": []}),
    "tools": Ask(400, "/v1/chat/completions", chat(tool_choice={"type": "function", "function": {"name": "x"}})),
    "deep tools": Ask(
        400,
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":"hi"}],"tool_choice":"required","tools":['
        b'{"type":"function","function":{"name":"f","parameters":' + b'{"not":' * 700 + b"{}" + b"}" * 700 + b"}}]}",
    ),
    "invocations": Ask(400, "/invocations", {"x": 1}),
    "previous": Ask(400, "/v1/responses", {"input": "hi", "previous_response_id": "resp_0"}),
    "anthropic": Ask(400, "/v1/messages", chat(max_tokens=-1)),
    "tokenize": Ask(400, "/tokenize", {"prompt": 1}),
    "detokenize": Ask(400, "/detokenize", {"tokens": [-1]}),
    "failed": Ask(500, body=PROMPT),
    "failed stream": Ask(500, body={**PROMPT, "stream": True}),
    "failed chat": Ask(500, "/v1/chat/completions", chat(max_tokens=4)),
    "leaves in the body": Ask(0, leaves_after=0),
    "leaves": Ask(499, body=PROMPT, leaves_after=1),
    "leaves a stream": Ask(0, body={**PROMPT, "stream": True}, leaves_after=1),
    "leaves a chat": Ask(499, "/v1/chat/completions", chat(max_tokens=4), leaves_after=1),
}


class App:
    """The whole app with a core that fails each request."""

    def __init__(self, folder: Path) -> None:
        self.frontend, spec = new_frontend(CONFIG)
        spec = msgspec.structs.replace(spec, run_directory=str(folder))
        engine = LocalEngine(self.frontend, lambda: None)
        peers = Peers(spec, 0)
        store = ResponseStore(Database.of_engine(spec), spec.config)
        generating = GeneratingEndpoints(engine, self.frontend.metrics, spec, store, peers)
        self.app = AccessLog(
            new_app(engine, self.frontend, spec, generating.endpoints(), peers, ResumableStreams()), has_all=False
        )

    async def ask(self, ask: Ask) -> int:
        """Send a request and return the status of the answer."""
        body = ask.body if isinstance(ask.body, bytes) else json.dumps(ask.body).encode()
        statuses: list[int] = []
        messages = iter([{"type": "http.request", "body": body, "more_body": False}][: ask.leaves_after])
        leaves = asyncio.Event()

        async def receive() -> Message:
            if (message := next(messages, None)) is not None:
                return message
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        if ask.leaves_after == 0:
            leaves.set()
        method = "POST"
        scope: Scope = {"type": "http", "method": method, "path": ask.path, "query_string": b"", "client": ("c", 1)}
        work = asyncio.ensure_future(self.app({**scope, "headers": list(ask.headers)}, receive, send))
        while not work.done():
            await asyncio.sleep(0)
            self.frontend.on_wakeup()
            keys = submitted_keys(self.frontend)
            if keys and ask.leaves_after is not None:
                leaves.set()
            elif keys:
                error = ErrorInfo("internal", "the core has failed")
                finished = [Finished(key=key, reason="error", error=error) for key in keys]
                self.frontend.on_core_message(EngineCoreOutputs(finished=finished))
            self.frontend.tick(time.monotonic())
        await work
        return statuses[0] if statuses else 0


async def objects_kept(work: Callable[[int], Awaitable[None]]) -> list[str]:
    """Return the objects in cycles that NUM_REQUESTS requests leave, if they leave an object each."""
    await asyncio.wait_for(work(3), DEADLINE_S)  # fills caches
    gc.freeze()  # the collector then looks at the objects of these requests alone
    try:
        await asyncio.wait_for(work(NUM_REQUESTS), DEADLINE_S)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = [f"{type(each).__name__} {each!r:.200}" for each in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    return kept if len(kept) >= NUM_REQUESTS else []


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_a_refused_request_leaves_no_cycle_of_objects(tmp_path: Path) -> None:
    app = App(tmp_path)

    async def kept_by_kind() -> dict[str, list[str]]:
        return {kind: await objects_kept(partial(ask, each)) for kind, each in ASKS.items()}

    async def ask(each: Ask, num_requests: int) -> None:
        for _ in range(num_requests):
            assert await app.ask(each) == each.status, each

    assert {kind: kept for kind, kept in asyncio.run(kept_by_kind()).items() if kept} == {}


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("path", [b"/", b"/fails"])
def test_a_connection_keeps_its_last_request_alone(path: bytes) -> None:
    async def test(server: Server) -> None:
        client = await server.connect()
        for _ in range(NUM_REQUESTS):
            client.send(GET % path)
            await client.answer()
        assert sum(type(each) is RequestResponseCycle for each in gc.get_objects()) <= 2

    gc.freeze()
    run(test)
