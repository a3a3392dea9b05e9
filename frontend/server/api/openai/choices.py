"""Base classes of responses. A response runs the Submit messages of one HTTP request and builds the body or the events.

The base classes do not know the fields of a choice: each endpoint has a Choice that builds them.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import ClassVar

import msgspec
from starlette.responses import Response

from .....ipc.codec import JsonObject, num_ids
from .....ipc.errors import InternalError
from .....ipc.messages.client import Delta, Logprobs, RequestMetrics, Submit, with_digests
from ....forms.openai.errors import encode_json
from ....forms.openai.generation import Generation
from ....forms.openai.params import constraint_field, errors_about, prompt_errors_about
from ..continuation import current
from ..keep_alive import COMMENT
from .events import DONE, TextEvents, event
from .local_engine import LocalEngine
from .run import Run
from .slices import in_slices

_UNUSED: JsonObject = {"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None}  # vLLM's keys


class Choice(ABC):
    """One element of a response's `choices`. A stream calls `opening` once and `chunk` for each delta, except for
    deltas that TextEvents encodes; a whole response calls `add` for each delta and then `build`."""

    has_begun = False  # the first chunk was built
    last: Delta  # the newest delta that was added

    def __init__(self, index: int, run: Run, *, is_plain: bool) -> None:
        """`is_plain`: whether all chunks between the first and the last hold only text."""
        self._index, self._run, self.is_plain = index, run, is_plain
        self.texts: list[str] = []
        self.token_ids = bytearray()
        self.with_logprobs: list[Delta] = []
        self.with_prompt_logprobs: list[Delta] = []  # each answer to a prompt may carry a part

    def add(self, delta: Delta) -> None:
        self.last = delta
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.with_logprobs.append(delta)
        self.add_prompt(delta)

    def add_prompt(self, delta: Delta) -> None:
        """Add the logprobs of the prompt that a delta has; they precede all tokens."""
        if delta.prompt_logprobs is not None:
            self.with_prompt_logprobs.append(delta)

    @property
    def prompt_logprobs(self) -> list[Logprobs]:
        """The prompt's logprobs in order of position. They are complete once all answers to the prompt have ended."""
        parts = sorted(self.with_prompt_logprobs, key=attrgetter("prompt_start"))
        return [each.prompt_logprobs for each in parts if each.prompt_logprobs is not None]

    @abstractmethod
    def build(self) -> JsonObject: ...

    def opening(self) -> list[JsonObject]:
        """Return the chunks to send before the first token."""
        return []

    @abstractmethod
    def chunk(self, delta: Delta) -> JsonObject | None:
        """Return the chunk for a delta, or None if the delta has nothing to show."""

    @abstractmethod
    def text_chunk(self, text: str) -> JsonObject:
        """Return the entry of a chunk's `choices` for a delta of a plain choice, which holds only text."""


class EngineResponse(ABC):
    """Base class of responses. A response runs the `submits` of one HTTP request; `whole` may be called once."""

    prompt_field: str  # request field that errors about a prompt name
    goes_on = False  # whether the answers can go on in another frontend; otherwise they are made again
    max_open: int | None = None  # the most submits that run at a time; None: all

    def __init__(self, engine: LocalEngine, model: str, request_id: str, submits: Sequence[Submit]) -> None:
        """`model`: the name of the served model or of an adapter."""
        self._engine, self.model, self._submits = engine, model, submits
        self._continuation = current()
        begun = self._continuation
        self._has_reader = begun.is_resumed or begun.was_begun or begun.num_events > 0  # of a part of the answer
        self.id, self._created = request_id, int(self._continuation.created)

    @contextlib.contextmanager
    def run(self) -> Iterator[Run]:
        continuation = self._continuation if self.goes_on else None
        if continuation is None and self._has_reader:
            raise InternalError("this answer cannot go on where it stopped: send the request again")
        running = self._engine.run(self._submits, self.model, self.max_open, continuation)
        with prompt_errors_about(self.prompt_field), running as run:
            yield run

    def pin_adapter(self, digest: bytes) -> None:
        """Use the adapter with this digest, even if its name stands for another adapter when the requests run."""
        self._submits = [msgspec.structs.replace(each, adapter_digest=digest) for each in self._submits]

    def pin_media(self, digests: list[bytes]) -> None:
        """Use the media with these digests of their bytes, even if their URLs lead to others when the requests run."""
        pinned = [msgspec.structs.replace(each, media=with_digests(each.media, digests)) for each in self._submits]
        self._submits = pinned

    def idle(self) -> bytes:
        """Return the bytes for times without events."""
        return COMMENT

    @abstractmethod
    async def whole(self) -> bytes | Response:
        """Generate until all answers have ended; return the body as JSON, or a Response if the body is not JSON."""

    def _head(self, kind: str) -> JsonObject:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.model}


class ChoicesResponse(EngineResponse):
    """Base class of the responses to completions and chats. Only one of `whole` and `events` may be called, once."""

    goes_on = True
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    streams_empty_text: ClassVar[bool]  # whether a delta without text becomes an event

    def __init__(
        self, engine: LocalEngine, body: Generation, model: str, request_id: str, submits: Sequence[Submit]
    ) -> None:
        super().__init__(engine, model, request_id, submits)
        self._options, self._constraint_field = body.stream_options, constraint_field(body)
        self._has_token_ids = bool(body.return_token_ids)
        self._has_cache_report = bool(body.include_cache_report)
        self._tier = {} if body.served_tier is None else {"service_tier": body.served_tier}
        self._last_event = b""

    @contextlib.contextmanager
    def run(self) -> Iterator[Run]:
        with errors_about(self._constraint_field), super().run() as run:
            run.includes_cache_report = self._has_cache_report
            yield run

    @abstractmethod
    def _choices(self, run: Run) -> Iterable[Choice]:
        """Create the choices lazily, one at a time: there may be thousands."""

    async def _new_choices(self, run: Run) -> list[Choice]:
        """Return new choices. The choices of one prompt share the list of deltas that hold its logprobs."""
        choices = await in_slices(self._choices(run))
        for index, choice in enumerate(choices):
            choice.with_prompt_logprobs = choices[index - index % run.num_answers].with_prompt_logprobs
        return choices

    async def whole(self) -> bytes:
        self.goes_on = self._submits[0].params.prompt_logprobs is None  # only computing a prompt again brings them back
        with self.run() as run:
            choices = await self._new_choices(run)
            async for deltas in run.deltas():
                for index, delta in deltas:
                    choices[index].add(delta)
            built = await in_slices(choice.build() for choice in choices)
            envelope = self._envelope(self.kind, built, run.usage()) | self._timings(run)
            return encode_json(envelope | _UNUSED | self._tier | self._prompt_fields(run, choices[0]))

    def _timings(self, run: Run) -> JsonObject:
        """Return the field `metrics`, the answer's durations; {} unless timings are enabled and there is exactly one
        choice."""
        if not self._engine.has_timings or run.num_choices != 1:
            return {}
        return {"metrics": timings(run.metrics, run.num_completion_tokens)}

    def _prompt_fields(self, run: Run, choice: Choice) -> JsonObject:
        """Return the fields about the prompt that a whole response has in addition to its choices."""
        return {}

    def _first_chunk_fields(self, run: Run) -> JsonObject:
        """Return the fields that the first chunk of a choice has in addition to the choice."""
        return {}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events; those of one turn (loop iteration) of the frontend are joined. The caller sends
        the `end`."""
        with_usage = bool(self._options and self._options.include_usage)
        in_every = bool(with_usage and self._options and self._options.continuous_usage_stats)
        with self.run() as run:
            choices = await self._new_choices(run)
            is_plain = not in_every and not self._has_token_ids and all(choice.is_plain for choice in choices)
            plain = await in_slices(self._text_events(choice, with_usage) for choice in choices) if is_plain else []
            num_sent = 0  # tokens of all answers
            async for deltas in run.deltas():
                events = []
                for index, delta in deltas:
                    choice = choices[index]
                    if not delta.token_ids and delta.finish_reason is None:
                        choice.add_prompt(delta)
                        continue
                    if plain and choice.has_begun and delta.finish_reason is None:
                        if delta.text or self.streams_empty_text:
                            events.append(plain[index].event(delta.text))
                        continue
                    counted = [(num_sent, each) for each in ([] if choice.has_begun else choice.opening())]
                    num_sent += num_ids(delta.token_ids)
                    if (chunk := choice.chunk(delta)) is not None:
                        counted.append((num_sent, chunk))
                    bodies = [
                        self._envelope(self.chunk_kind, [each], run.usage(count) if in_every else None, with_usage)
                        for count, each in counted
                    ]
                    if bodies and not choice.has_begun:
                        bodies[0] |= self._first_chunk_fields(run)
                    events += map(event, bodies)
                    choice.has_begun = True
                if events:
                    yield b"".join(events)
            if with_usage:
                self._last_event = event(self._envelope(self.chunk_kind, [], run.usage()) | self._timings(run))

    def end(self) -> bytes:
        """Return the events after those of `events`."""
        return self._last_event + DONE

    def _text_events(self, choice: Choice, with_null: bool) -> TextEvents:
        return TextEvents(lambda text: self._envelope(self.chunk_kind, [choice.text_chunk(text)], None, with_null))

    def _envelope(
        self, kind: str, choices: list[JsonObject], usage: JsonObject | None, with_null: bool = False
    ) -> JsonObject:
        envelope = self._head(kind) | {"choices": choices} | self._tier
        if usage is not None or with_null:
            envelope["usage"] = usage
        return envelope


def timings(metrics: RequestMetrics, num_tokens: int) -> JsonObject:
    """Return the durations of an answer with `num_tokens`, in ms, and tokens per second; unknown ones are left out."""
    begin, first, end = metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time
    found: JsonObject = {}
    if begin:
        found["queue_time_ms"] = (begin - metrics.arrival_time) * 1000
    if begin and first:
        found["time_to_first_token_ms"] = (first - begin) * 1000
    if first and end:
        found["generation_time_ms"] = (end - first) * 1000
        if num_tokens > 1:
            found["mean_itl_ms"] = (end - first) * 1000 / (num_tokens - 1)
    if begin and end > begin:
        found["tokens_per_second"] = num_tokens / (end - begin)
    return found
