"""An app of a model that hears audio, its clients, and a core that answers each piece of a clip with its own text."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import msgspec
import openai
from starlette.types import ASGIApp, Message

from tokenloom.frontend.http.app import GeneratingEndpoints, new_app
from tokenloom.frontend.http.peers import Peers
from tokenloom.frontend.media.clip_head import ClipHead
from tokenloom.frontend.openai.local_engine import LocalEngine
from tokenloom.frontend.openai.response_store import ResponseStore
from tokenloom.frontend.requests.frontend import Frontend
from tokenloom.frontend.requests.media.media_input import MediaInput
from tokenloom.frontend.text.chat_template import ChatTemplate
from tokenloom.frontend.text.media_marker import MediaMarker
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.base import PROTOCOL_VERSION, Welcome
from tokenloom.ipc.messages.core import AbortRequests, EngineCoreOutputs, EngineCoreRequest, Finished, KeyLogprobs
from tokenloom.ipc.models.audio_config import AudioConfig
from tokenloom.tests.frontend.bench import TOKENIZER, ids
from tokenloom.tests.frontend.requests.fake_clips import PIECE_TOKENS, FakePieceReader, clip
from tokenloom.tests.frontend.requests.fake_media import MARKER, FakePlaceholders, seeing_spec
from tokenloom.tests.support.in_loop import in_loop

DEADLINE_S = 30.0
CHUNK_BYTES = 64 << 10  # of a body, as uvicorn receives it
KEY = "sk-loom"
EOS = 2
(PLACEHOLDER,) = ids(MARKER)
LANGUAGE_IDS = {"en": 300, "de": 301}  # of Whisper; each of its clips is in the last one
TEMPLATE = ChatTemplate(
    "{% for m in messages %}[{{ m.content }}]{% endfor %}", {}, marker=MediaMarker("audio", MARKER, MARKER)
)


class AppTransport(httpx2.AsyncBaseTransport):
    """Calls an app without sockets, and gives its answer out as it comes. Closing an answer disconnects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body, headers = await request.aread(), [(name.lower(), value) for name, value in request.headers.raw]
        scope = {"type": "http", "method": request.method, "path": request.url.path, "query_string": b""}
        places = iter(range(0, max(len(body), 1), CHUNK_BYTES))
        stream = AppStream()

        async def receive() -> Message:
            await asyncio.sleep(0)  # a chunk a turn, as from a socket
            if (place := next(places, None)) is None:
                await stream.closed.wait()
                return {"type": "http.disconnect"}
            end = place + CHUNK_BYTES
            return {"type": "http.request", "body": body[place:end], "more_body": end < len(body)}

        stream.start(self._app({**scope, "headers": headers, "client": ("c", 1)}, receive, stream.send))  # type: ignore[arg-type]
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


class Served:
    """`held`: texts of pieces that are not answered until `release`; `failing`: errors of pieces by their texts.

    Without a `family` the model hears no audio."""

    def __init__(self, folder: Path, family: str = "qwen2_audio", **options: Any) -> None:
        audio = AudioConfig(
            family=family,  # type: ignore[arg-type]
            audio_token_id=PLACEHOLDER,
            hidden_size=8,
            num_layers=1,
            num_mel_bins=128,
            window_frames=2000,
            window_rows=1000,
            max_windows=1 if family == "qwen2_audio" else 0,
        )
        spec = seeing_spec(folder, PLACEHOLDER, **options)
        if family:
            languages = LANGUAGE_IDS if family == "whisper" else None
            model = msgspec.structs.replace(spec.model, vision=None, audio=audio, language_ids=languages)
            spec = msgspec.structs.replace(spec, model=model)
        self.spec = spec
        self.loop = asyncio.get_running_loop()
        self.reader = FakePieceReader()
        processor: Any = SimpleNamespace(num_embeds=lambda grid: PIECE_TOKENS)
        head = ClipHead(processor, PLACEHOLDER, PIECE_TOKENS)
        media = MediaInput(self.reader, head if family == "whisper" else FakePlaceholders(PLACEHOLDER))
        self.frontend = Frontend(self.spec, TOKENIZER, TEMPLATE, self._wake, media)
        self.frontend.connect()
        self.frontend.on_core_message(Welcome(protocol_version=PROTOCOL_VERSION, run_id=self.spec.run_id))
        strict = bool(options.get("strict_fields"))
        engine = LocalEngine(self.frontend, lambda: self.loop.call_soon(self.turn), has_strict_fields=strict)
        peers = Peers(self.spec, 0)
        generating = GeneratingEndpoints(
            engine, self.frontend.metrics, self.spec, ResponseStore(self.spec), peers
        ).endpoints()
        self.app = new_app(engine, self.frontend, self.spec, generating, peers)
        self.requests: list[EngineCoreRequest] = []  # all so far
        self.aborted: list[str] = []  # texts of pieces
        self.held: set[str] = set()
        self.failing: dict[str, str] = {}
        self._open: dict[int, EngineCoreRequest] = {}
        self.changed = asyncio.Event()
        headers = {"authorization": f"Bearer {KEY}"}
        self.http = httpx2.AsyncClient(transport=AppTransport(self.app), base_url="http://app", headers=headers)
        self.client = openai.AsyncOpenAI(base_url="http://app/v1", api_key=KEY, max_retries=0, http_client=self.http)

    def _wake(self) -> None:
        self.loop.call_soon_threadsafe(self.turn)

    def turn(self) -> None:
        self.frontend.on_wakeup()
        self.frontend.tick(self.loop.time())
        messages = self.frontend.outbox.to_cores[0].copy()
        self.frontend.outbox.to_cores[0].clear()
        for message in messages:
            if isinstance(message, EngineCoreRequest):
                self.requests.append(message)
                self._open[message.children[0].key] = message
            elif isinstance(message, AbortRequests):
                self.aborted += [self.text_of(self._open.pop(key)) for key in message.keys if key in self._open]
        for key, request in list(self._open.items()):
            if self.text_of(request) not in self.held:
                self._answer(key, self._open.pop(key))
        self.changed.set()

    def text_of(self, request: EngineCoreRequest) -> str:
        """Return the text of a request's piece."""
        content = self.frontend.media.store.open(request.media[0].digest)
        assert content is not None, "pieces of open requests are in the store"
        return bytes(content).decode()

    @property
    def open_texts(self) -> list[str]:
        return [self.text_of(request) for request in self._open.values()]

    def prompt_of(self, request: EngineCoreRequest) -> str:
        """Return a request's prompt with one marker for its piece."""
        text = TOKENIZER.decode(decode_ids(request.prompt_token_ids).tolist(), skip_special_tokens=False)
        return text.replace(MARKER * PIECE_TOKENS, MARKER)

    def end(self, key: int, reason: str = "stop") -> None:
        """End the answer of a piece that is held."""
        self._open.pop(key)
        self._say(finished=[Finished(key=key, reason=reason)])  # type: ignore[arg-type]

    def _answer(self, key: int, request: EngineCoreRequest) -> None:
        text = self.text_of(request)
        if text in self.failing:
            error = ErrorInfo("internal", self.failing[text])
            self._say(accepted=[key], finished=[Finished(key=key, reason="error", error=error)])
            return
        if request.params.allowed_token_ids:  # the question for the language
            self.say_tokens(key, request.params.allowed_token_ids[-1:], False)
            self._say(finished=[Finished(key=key, reason="length")])
            return
        self.say_tokens(key, [*ids(text), EOS], request.params.logprobs is not None)
        self._say(finished=[Finished(key=key, reason="stop")])

    def say_tokens(self, key: int, token_ids: list[int], has_logprobs: bool, start: int = 0) -> None:
        """Send tokens of an answer; the logprob of the i-th is -i / 4."""
        count = len(token_ids)
        logprobs = KeyLogprobs(
            keys=encode_ids([key] * count),
            positions=encode_ids(range(start, start + count)),
            widths=encode_ids([1] * count),
            ranks=encode_ids([1] * count),
            token_ids=encode_ids(token_ids),
            logprobs=array("f", [-i / 4 for i in range(start, start + count)]).tobytes(),
        )
        self._say(
            accepted=[key],
            keys=encode_ids([key]),
            starts=encode_ids([start]),
            counts=encode_ids([count]),
            token_ids=encode_ids(token_ids),
            logprobs=logprobs if has_logprobs else None,
        )

    def _say(self, **columns: Any) -> None:
        self.frontend.on_core_message(EngineCoreOutputs(**columns))
        self.frontend.tick(self.loop.time())

    def release(self, *texts: str) -> None:
        """Answer the pieces with these texts, now or when they come."""
        self.held -= set(texts)
        self.loop.call_soon(self.turn)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds at the end of a turn."""
        while not condition():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), DEADLINE_S)

    async def until_no_pins(self) -> None:
        """Wait until no job pins a medium."""
        while any(
            user.startswith("job") for pin in [*self.frontend.media.store._pins.values()] for user in [*pin.users]
        ):
            await asyncio.sleep(0.01)

    async def post(self, content: bytes, task: str = "transcriptions", **fields: Any) -> httpx2.Response:
        data = {name: value for name, value in fields.items() if value is not None}
        files = {"file": ("speech.wav", content)}
        return await self.http.post(f"/v1/audio/{task}", data=data, files=files)

    async def error(self, content: bytes = b"", task: str = "transcriptions", **fields: Any) -> tuple[int, str, str]:
        """Return status, message and parameter of an error."""
        response = await self.post(content or clip("x"), task, **fields)
        found = response.json()["error"]
        return response.status_code, found["message"], found["param"]


class TimedLoop(asyncio.SelectorEventLoop):
    """Loop that measures the processor time of its longest callback."""

    longest_s = 0.0

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        def timed() -> None:
            begun = time.thread_time()
            callback(*args)
            self.longest_s = max(self.longest_s, time.thread_time() - begun)

        return super().call_soon(timed, context=context)


def with_served(
    new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test in a loop, with a served model of these options."""

    @asynccontextmanager
    async def context(folder: Path) -> AsyncIterator[Served]:
        lora = {"adapter_folder": str(folder), "allow_runtime_lora": True} if "enable_lora" in options else {}
        served = Served(folder, **options, **lora)
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield served
        finally:
            served.frontend.stop("the test ends")
            await served.http.aclose()

    return in_loop(context, new_loop)
