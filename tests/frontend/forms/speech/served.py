"""An app of a model that hears audio, its clients, and a core that answers each piece of a clip with its own text."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import msgspec

from tokenloom.frontend.server.media.model_media import ClipHead
from tokenloom.frontend.server.requests.media.media_input import MediaInput
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.frontend.server.text.media_marker import MediaMarker
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.core import AbortRequests, EngineCoreOutputs, EngineCoreRequest, Finished, KeyLogprobs
from tokenloom.ipc.spec.models.audio_config import AudioConfig
from tokenloom.tests.frontend.bench import TOKENIZER, ids
from tokenloom.tests.frontend.server.http.served_app import DEADLINE_S, ServedApp, serving
from tokenloom.tests.frontend.server.requests.fake_clips import PIECE_TOKENS, FakePieceReader, clip
from tokenloom.tests.frontend.server.requests.fake_media import MARKER, FakePlaceholders, seeing_spec
from tokenloom.tests.support.in_loop import in_loop

EOS = 2
(PLACEHOLDER,) = ids(MARKER)
LANGUAGE_IDS = {"en": 300, "de": 301}  # of Whisper; each of its clips is in the last one
TEMPLATE = ChatTemplate(
    "{% for m in messages %}[{{ m.content }}]{% endfor %}", {}, marker=MediaMarker("audio", MARKER, MARKER)
)


class Served(ServedApp):
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
        self.reader = FakePieceReader()
        processor: Any = SimpleNamespace(num_embeds=lambda grid: PIECE_TOKENS)
        head = ClipHead(processor, PLACEHOLDER, PIECE_TOKENS)
        media = MediaInput(self.reader, head if family == "whisper" else FakePlaceholders(PLACEHOLDER))
        super().__init__(spec, TEMPLATE, media)
        self.requests: list[EngineCoreRequest] = []  # all so far
        self.aborted: list[str] = []  # texts of pieces
        self.held: set[str] = set()
        self.failing: dict[str, str] = {}
        self._open: dict[int, EngineCoreRequest] = {}
        self.changed = asyncio.Event()

    def turn(self) -> None:
        for message in self.messages_to_core():
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

    def served(folder: Path) -> Served:
        lora = {"adapter_folder": str(folder), "allow_runtime_lora": True} if "enable_lora" in options else {}
        return Served(folder, **options, **lora)

    return in_loop(lambda folder: serving(lambda: served(folder)), new_loop)
