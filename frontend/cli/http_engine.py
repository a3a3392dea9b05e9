"""HttpEngine: an attached engine over OpenAI's API, for one that is reached by a URL alone.

Any server of that API will do. Knows no ZeroMQ.
"""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Generator, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import SplitResult, urlsplit

import msgspec

from ...ipc.errors import ConfigError, EngineDead, RequestError
from ...ipc.messages.client import ChatMessage
from ...ipc.params.sampling_params import SamplingParams
from .attached import End

TIMEOUT_S = 600.0  # without a byte of an answer
MAX_LINE_BYTES = 16 << 20  # of a stream
_ALWAYS_SENT = ("temperature", "top_p", "max_tokens", "seed")  # others only where they differ from our own defaults


class _Delta(msgspec.Struct, frozen=True):
    """Part of an answer; a server sends some of the fields."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        return (self.reasoning_content or self.reasoning or "") + (self.content or "")


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()
    text: str | None = None  # of a completion, which has no delta
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct, frozen=True):
    """One event of a stream."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


class _Card(msgspec.Struct, frozen=True):
    """A model in /v1/models."""

    id: str
    default_sampling_params: dict[str, float] = {}
    max_model_len: int | None = None


class _Cards(msgspec.Struct, frozen=True):
    data: list[_Card]


class HttpEngine:
    """An attached engine at `url`, with or without /v1; `api_key` is sent if there is one. Each answer has a
    connection of its own. ConfigError, also of the constructor, if no server of OpenAI's API answers there;
    RequestError if the server answers with another status than 200."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url)
        self._url = url
        self._parts = parts
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        cards = self._read_models()
        self.model: str = cards[0].id
        self.sampling_defaults: Mapping[str, float] = cards[0].default_sampling_params
        self.max_model_len = cards[0].max_model_len

    def _read_models(self) -> list[_Card]:
        with contextlib.closing(self._connect()) as connection:
            response = self._send(connection, "GET", "/v1/models", None)
            body = response.read()
        try:
            cards = msgspec.json.decode(body, type=_Cards).data
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._url} is no server of OpenAI's API: {error} in its /v1/models") from None
        if not cards:
            raise ConfigError(f"{self._url} serves no model")
        return cards

    def health(self) -> tuple[bool, dict[str, object]]:
        """Return whether the server's /health is a 200, and the object in it; a server may send none."""
        with contextlib.closing(self._connect()) as connection:
            try:
                connection.request("GET", self._root + "/health", None, self._headers)
                response = connection.getresponse()
                body = response.read(MAX_LINE_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise EngineDead(f"{self._url} does not answer: {error}") from None
        try:
            return response.status == 200, msgspec.json.decode(body or b"{}", type=dict[str, object])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return response.status == 200, {}

    def stream(self, prompt: str | list[ChatMessage], params: SamplingParams) -> Generator[str, None, End]:
        """Yield the text of an answer as it is generated, with its reasoning; return how it ended. Closing the
        generator aborts it. RequestError for a refused request, EngineDead if the stream is cut."""
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}} | _sampling(params)
        path = "/v1/completions"
        if isinstance(prompt, str):
            body["prompt"] = prompt
        else:
            path = "/v1/chat/completions"
            body["messages"] = [{"role": turn.role, "content": turn.text, **turn.more} for turn in prompt]
        reason: str | None = None
        num_tokens = 0
        is_whole = False
        with contextlib.closing(self._connect()) as connection:
            response = self._send(connection, "POST", path, msgspec.json.encode(body))
            for data in self._events(response):
                if data == b"[DONE]":
                    is_whole = True
                    break
                chunk = self._decode(data)
                for choice in chunk.choices:
                    reason = choice.finish_reason or reason
                    if text := choice.text or choice.delta.text:
                        num_tokens += 1
                        yield text
                if chunk.usage is not None:
                    num_tokens = chunk.usage.completion_tokens or num_tokens
        if not is_whole and reason is None:
            raise EngineDead(f"{self._url} has ended the answer early")
        return End(reason, num_tokens)

    def _connect(self) -> http.client.HTTPConnection:
        return new_connection(self._parts, TIMEOUT_S)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        """Send a request and return its 200; RequestError for another status, ConfigError if nothing answers."""
        try:
            connection.request(method, self._root + path, body, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"{self._url} does not answer: {error}") from None
        if response.status != 200:
            reason = _message(response.read(MAX_LINE_BYTES))
            raise RequestError(f"{self._url}: {path}: status {response.status}: {reason}")
        return response

    def _events(self, response: http.client.HTTPResponse) -> Generator[bytes, None, None]:
        """Yield the data of each event of a stream, which are one line each in this API."""
        while True:
            try:
                line = response.readline(MAX_LINE_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise EngineDead(f"{self._url} has ended the answer early: {error}") from None
            if not line:
                return
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()

    def _decode(self, data: bytes) -> _Chunk:
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise EngineDead(f"{self._url} sends a stream that is not OpenAI's: {error}") from None
        if chunk.error is not None:
            raise RequestError(_message(data))
        return chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a body: the usual ones, and ours where they differ from what no field means."""
    changed: dict[str, Any] = msgspec.to_builtins(params)
    always = {name: getattr(params, name) for name in _ALWAYS_SENT}
    return {name: value for name, value in (changed | always).items() if value is not None}


def _message(body: bytes) -> str:
    """Return the message of an error's body, or the start of the body."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body[:200].decode(errors="replace")
    message = message_of(value)
    if message is not None:
        return message
    return str((isinstance(value, dict) and value.get("error")) or value)[:200]


def new_connection(url: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection to the server of a URL, which the first request opens."""
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    return kind(url.hostname or "", url.port, timeout=timeout_s)


def message_of(value: object) -> str | None:
    """Return the message of an OpenAI error object; None if `value` is none."""
    error = value.get("error") if isinstance(value, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else None
