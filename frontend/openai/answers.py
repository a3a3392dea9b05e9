"""Run a request to /v1/completions or /v1/chat/completions and build its response, whole or as events.

Does not know the fields of a choice: the endpoint's Choice builds these.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import ClassVar

from ...ipc.codec import JsonObject, num_ids
from ...ipc.messages.client import Delta, Logprobs, Submit
from .events import DONE, TextEvents, event
from .forms.errors import encode_json
from .forms.params import prompt_errors_about
from .forms.schema import Generation
from .local_engine import LocalEngine, Run
from .slices import in_slices

_UNUSED: JsonObject = {"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None}  # vLLM's keys


class Choice(ABC):
    """Choice of a response. Streams use `opening` and `chunk` per delta; others `add` per delta and then `build`."""

    is_plain: bool  # the chunks between the first and the last hold only text
    has_begun = False  # the first chunk was built
    last: Delta  # the newest delta that was added

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids = bytearray()
        self.with_logprobs: list[Delta] = []
        self.with_prompt_logprobs: list[Delta] = []  # any answer to a prompt may bring a part of them

    def add(self, delta: Delta) -> None:
        self.last = delta
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.with_logprobs.append(delta)
        if delta.prompt_logprobs is not None:
            self.with_prompt_logprobs.append(delta)

    @property
    def prompt_logprobs(self) -> list[Logprobs]:
        """Return the prompt's logprobs in order; complete once all answers to the prompt have ended."""
        parts = sorted(self.with_prompt_logprobs, key=attrgetter("prompt_start"))
        return [each.prompt_logprobs for each in parts if each.prompt_logprobs is not None]

    @abstractmethod
    def build(self) -> JsonObject: ...

    def opening(self) -> list[JsonObject]:
        """Return the chunks that precede all tokens."""
        return []

    @abstractmethod
    def chunk(self, delta: Delta) -> JsonObject | None:
        """Return the chunk of a delta, or None if the delta has nothing visible."""

    @abstractmethod
    def text_chunk(self, text: str) -> JsonObject:
        """Return the chunk of a delta that brings only text to a plain choice."""


class Answers(ABC):
    """Response to one completion or chat. Use `whole` or `events`, once."""

    stream_end = DONE
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prompt_field: ClassVar[str]
    streams_empty_text: ClassVar[bool]  # tokens without text are an event

    def __init__(
        self, engine: LocalEngine, body: Generation, model: str, request_id: str, submits: Sequence[Submit]
    ) -> None:
        self._engine = engine
        self._options = body.stream_options
        self._has_token_ids = bool(body.return_token_ids)
        self._model = model
        self.id = request_id
        self._submits = submits
        self._created = int(time.time())

    @contextlib.contextmanager
    def run(self) -> Iterator[Run]:
        with prompt_errors_about(self.prompt_field), self._engine.run(self._submits) as run:
            yield run

    @abstractmethod
    def _choices(self, run: Run) -> Iterable[Choice]:
        """Make the choices, one at a time: there may be thousands."""

    async def whole(self) -> bytes:
        """Return the response body once all answers have ended."""
        with self.run() as run:
            choices = await in_slices(self._choices(run))
            for index, choice in enumerate(choices):
                choice.with_prompt_logprobs = choices[index - index % run.num_answers].with_prompt_logprobs
            async for deltas in run.deltas():
                for index, delta in deltas:
                    choices[index].add(delta)
            built = await in_slices(choice.build() for choice in choices)
            envelope = self._envelope(self.kind, built, run.usage()) | self._timings(run)
            return encode_json(envelope | _UNUSED | self._prompt_fields(run, choices[0]))

    def _timings(self, run: Run) -> JsonObject:
        return run.timings() if self._engine.has_timings else {}

    def _prompt_fields(self, run: Run, choice: Choice) -> JsonObject:
        """Return a whole response's fields about its only prompt."""
        return {}

    def _first_chunk_fields(self, run: Run) -> JsonObject:
        """Return the fields that the first chunk of a choice has beside the choice."""
        return {}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of each turn, without the end of the stream."""
        with_usage = bool(self._options and self._options.include_usage)
        in_every = bool(with_usage and self._options and self._options.continuous_usage_stats)
        with self.run() as run:
            choices = await in_slices(self._choices(run))
            is_plain = not in_every and not self._has_token_ids and all(choice.is_plain for choice in choices)
            plain = await in_slices(self._text_events(choice, with_usage) for choice in choices) if is_plain else []
            num_sent = 0  # tokens of all answers
            async for deltas in run.deltas():
                events = []
                for index, delta in deltas:
                    choice = choices[index]
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
                yield event(self._envelope(self.chunk_kind, [], run.usage()) | self._timings(run))

    def _text_events(self, choice: Choice, with_null: bool) -> TextEvents:
        def body_of(text: str) -> JsonObject:
            return self._envelope(self.chunk_kind, [choice.text_chunk(text)], None, with_null)

        return TextEvents(body_of)

    def _envelope(
        self, kind: str, choices: list[JsonObject], usage: JsonObject | None, with_null: bool = False
    ) -> JsonObject:
        envelope: JsonObject = {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if usage is not None or with_null:
            envelope["usage"] = usage
        return envelope
