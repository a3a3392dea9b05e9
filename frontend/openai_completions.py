"""/v1/completions: texts or token ids in, answers out, whole or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import cast

from ..ipc.codec import decode_ids
from ..ipc.messages import Accepted, Delta, Logprobs
from .input_processor import InputProcessor
from .openai_errors import encode_json
from .openai_ids import answer_id
from .openai_logprobs import CompletionLogprobs
from .openai_params import logit_bias, num_choices, sampling_params, structured_params
from .openai_prompts import prompt_submits
from .openai_run import Run
from .openai_schema import CompletionRequest
from .server_engine import LocalEngine
from .server_events import TextEvents, event
from .tokenizer import JsonObject


class Completion:
    """One request to the endpoint. `whole` or `events` is used once."""

    def __init__(self, engine: LocalEngine, body: CompletionRequest, model: str) -> None:
        self._engine = engine
        self._body = body
        self._model = model
        self.id = answer_id("cmpl", body.request_id)
        self._created = int(time.time())
        self._n = num_choices(body)
        self._params = sampling_params(
            body,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
            logit_bias=logit_bias(body),
            **structured_params(body),
        )
        self._submits = prompt_submits(
            self.id, "prompt", body.prompt, self._params, engine.inputs, body.add_special_tokens
        )

    def _run(self) -> Run:
        return Run(self._engine, self._submits, self._n)

    async def whole(self) -> bytes:
        async with self._run() as run:
            choices = [_Choice(self._body, self._engine.inputs) for _ in range(run.num_choices)]
            prompt_logprobs: list[list[Logprobs]] = [[] for _ in self._submits]
            async for news in run.news():
                for index, delta in news:
                    choices[index].add(delta)
                    if delta.prompt_logprobs is not None:  # whichever answer of the prompt has news first brings them
                        prompt_logprobs[index // self._n].append(delta.prompt_logprobs)
            built = [
                choice.build(index, run, prompt_logprobs[index // self._n]) for index, choice in enumerate(choices)
            ]
            return encode_json(self._envelope(built, run.usage()))

    async def events(self) -> AsyncGenerator[bytes, None]:
        body, inputs = self._body, self._engine.inputs
        options = body.stream_options
        with_usage = bool(options and options.include_usage)
        in_every = bool(options and options.continuous_usage_stats)
        async with self._run() as run:
            logprobs = [CompletionLogprobs() for _ in range(run.num_choices)]
            has_begun = [False] * run.num_choices
            plain = self._text_events(run.num_choices, with_usage)
            async for news in run.news():
                chunks = []
                for index, delta in news:
                    if plain and has_begun[index] and delta.finish_reason is None:
                        chunks.append(plain[index].event(delta.text))
                        continue
                    if body.echo and not has_begun[index]:
                        _add_first(logprobs[index], run.prompt_of(index), inputs)
                    choice = _chunk_choice(index, delta, body, logprobs[index])
                    if not has_begun[index]:
                        has_begun[index] = True
                        _begin(choice, run, index, body, inputs)
                    usage = run.usage() if in_every else None
                    chunks.append(event(self._envelope([choice], usage, with_null=with_usage)))
                if chunks:
                    yield b"".join(chunks)
            if with_usage:
                yield event(self._envelope([], run.usage()))

    def _text_events(self, num_choices: int, with_null: bool) -> list[TextEvents]:
        """For the events that carry text alone, by choice; none where all carry more."""
        body = self._body
        if (
            body.logprobs is not None
            or body.return_token_ids
            or (body.stream_options and body.stream_options.continuous_usage_stats)
        ):
            return []

        def body_of(index: int, text: str) -> JsonObject:
            return self._envelope([_text_choice(index, text)], None, with_null)

        return [TextEvents(partial(body_of, index)) for index in range(num_choices)]

    def _envelope(self, choices: list[JsonObject], usage: JsonObject | None, with_null: bool = False) -> JsonObject:
        envelope: JsonObject = {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if usage is not None or with_null:
            envelope["usage"] = usage
        return envelope


class _Choice:
    """An answer that is collected to be sent whole."""

    def __init__(self, body: CompletionRequest, inputs: InputProcessor) -> None:
        self._body = body
        self._inputs = inputs
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self._text.append(delta.text)
        self._last = delta
        if self._body.return_token_ids:
            self._token_ids += decode_ids(delta.token_ids)
        if delta.logprobs is not None:
            self._logprobs.append(delta.logprobs)

    def _columns(self, prompt: Accepted | None, prompt_logprobs: list[Logprobs]) -> JsonObject:
        columns = CompletionLogprobs()
        if self._body.echo:
            _add_first(columns, prompt, self._inputs)
            for each in prompt_logprobs:
                columns.add(each)
        for each in self._logprobs:
            columns.add(each)
        return columns.take()

    def build(self, index: int, run: Run, prompt_logprobs: list[Logprobs]) -> JsonObject:
        assert self._last is not None, "every choice has ended"
        text = "".join(self._text)
        prompt = run.prompt_of(index)
        if self._body.echo and prompt is not None:
            text = _prompt_text(prompt.prompt, prompt.prompt_token_ids, self._inputs) + text
        choice: JsonObject = {
            "index": index,
            "text": text,
            "logprobs": self._columns(prompt, prompt_logprobs) if self._body.logprobs is not None else None,
            "finish_reason": self._last.finish_reason,
            "stop_reason": self._last.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = self._token_ids
            choice["prompt_token_ids"] = None if prompt is None else decode_ids(prompt.prompt_token_ids).tolist()
        return choice


def _text_choice(index: int, text: str, finish_reason: str | None = None) -> JsonObject:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _chunk_choice(index: int, delta: Delta, body: CompletionRequest, logprobs: CompletionLogprobs) -> JsonObject:
    choice = _text_choice(index, delta.text, delta.finish_reason)
    if delta.finish_reason is not None:
        choice["stop_reason"] = delta.stop_reason
    if body.logprobs is not None:
        logprobs.add(delta.prompt_logprobs)
        logprobs.add(delta.logprobs)
        choice["logprobs"] = logprobs.take()
    if body.return_token_ids:
        choice["token_ids"] = decode_ids(delta.token_ids).tolist()
    return choice


def _add_first(columns: CompletionLogprobs, prompt: Accepted | None, inputs: InputProcessor) -> None:
    if prompt is not None:
        columns.add_first(inputs.detokenize(prompt.prompt_token_ids[:4]))


def _begin(choice: JsonObject, run: Run, index: int, body: CompletionRequest, inputs: InputProcessor) -> None:
    """What stands in the first chunk of a choice alone."""
    prompt = run.prompt_of(index)
    if prompt is None:
        return
    if body.echo:
        text = _prompt_text(prompt.prompt, prompt.prompt_token_ids, inputs)
        choice["text"] = text + cast(str, choice["text"])
    if body.return_token_ids:
        choice["prompt_token_ids"] = decode_ids(prompt.prompt_token_ids).tolist()


def _prompt_text(text: str | None, token_ids: bytes, inputs: InputProcessor) -> str:
    return inputs.detokenize(token_ids) if text is None else text
