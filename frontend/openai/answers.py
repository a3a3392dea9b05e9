"""Answers: a request to /v1/completions or /v1/chat/completions on its way back, whole or as events.

Knows no field of a choice: what is text, a message or a call is the endpoint's own.
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

_UNUSED: JsonObject = {"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None}  # vLLM has these


class Choice(ABC):
    """One answer: take its `opening` and the `chunk` of each of its deltas, or `add` all of them and `build` it."""

    is_plain: bool  # after its first chunk it brings text alone, until its end
    has_begun = False  # whether there was a chunk
    last: Delta  # that was added

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids = bytearray()
        self.with_logprobs: list[Delta] = []
        self.of_prompt: list[Delta] = []  # with logprobs of the prompt, which any of its answers may bring

    def add(self, delta: Delta) -> None:
        self.last = delta
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.with_logprobs.append(delta)
        if delta.prompt_logprobs is not None:
            self.of_prompt.append(delta)

    @property
    def prompt_logprobs(self) -> list[Logprobs]:
        """In the order of the prompt, once all answers to it are whole."""
        parts = sorted(self.of_prompt, key=attrgetter("prompt_start"))
        return [each.prompt_logprobs for each in parts if each.prompt_logprobs is not None]

    @abstractmethod
    def build(self) -> JsonObject: ...

    def opening(self) -> list[JsonObject]:
        """The chunks before those of its tokens."""
        return []

    @abstractmethod
    def chunk(self, delta: Delta) -> JsonObject | None:
        """None where a delta brings nothing to see."""

    @abstractmethod
    def text_chunk(self, text: str) -> JsonObject:
        """The only chunk of a delta that brings text to a plain choice."""


class Answers(ABC):
    """`whole` or `events` is used once."""

    stream_end = DONE
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prompt_field: ClassVar[str]
    tells_empty: ClassVar[bool]  # whether tokens without text are an event

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
        """All of them, made one by one."""

    async def whole(self) -> bytes:
        with self.run() as run:
            choices = await in_slices(self._choices(run))
            for index, choice in enumerate(choices):
                choice.of_prompt = choices[index - index % run.num_answers].of_prompt
            async for news in run.news():
                for index, delta in news:
                    choices[index].add(delta)
            built = await in_slices(choice.build() for choice in choices)
            envelope = self._envelope(self.kind, built, run.usage()) | self._timings(run)
            return encode_json(envelope | _UNUSED | self._of_prompt(run, choices[0]))

    def _timings(self, run: Run) -> JsonObject:
        return run.timings() if self._engine.tells_timings else {}

    def _of_prompt(self, run: Run, choice: Choice) -> JsonObject:
        """What a whole answer tells of its only prompt."""
        return {}

    def _at_start(self, run: Run) -> JsonObject:
        """What the first chunk of a choice tells beside the choice."""
        return {}

    async def events(self) -> AsyncGenerator[bytes, None]:
        with_usage = bool(self._options and self._options.include_usage)
        in_every = bool(with_usage and self._options and self._options.continuous_usage_stats)
        with self.run() as run:
            choices = await in_slices(self._choices(run))
            is_plain = not in_every and not self._has_token_ids and all(choice.is_plain for choice in choices)
            plain = await in_slices(self._text_events(choice, with_usage) for choice in choices) if is_plain else []
            num_told = 0  # tokens of the answers
            async for news in run.news():
                events = []
                for index, delta in news:
                    choice = choices[index]
                    if plain and choice.has_begun and delta.finish_reason is None:
                        if delta.text or self.tells_empty:
                            events.append(plain[index].event(delta.text))
                        continue
                    counted = [(num_told, each) for each in ([] if choice.has_begun else choice.opening())]
                    num_told += num_ids(delta.token_ids)
                    if (chunk := choice.chunk(delta)) is not None:
                        counted.append((num_told, chunk))
                    bodies = [
                        self._envelope(self.chunk_kind, [each], run.usage(count) if in_every else None, with_usage)
                        for count, each in counted
                    ]
                    if bodies and not choice.has_begun:
                        bodies[0] |= self._at_start(run)
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
