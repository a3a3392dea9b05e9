"""/v1/chat/completions: a conversation in, the assistant's next turn out, whole or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from functools import partial

from ..ipc.codec import decode_ids
from ..ipc.errors import RequestError
from ..ipc.messages import Delta, Submit
from ..ipc.structured_outputs import StructuredOutputsParams
from .openai_errors import encode_json
from .openai_ids import answer_id
from .openai_logprobs import chat_logprobs
from .openai_messages import encode_messages
from .openai_params import chat_max_tokens, logit_bias, num_choices, sampling_params, structured_params
from .openai_run import Run
from .openai_schema import ChatRequest, NamedTool
from .openai_text import AnswerStyle, AnswerText, Piece
from .openai_tools import ParserName, forcing_schema
from .server_engine import LocalEngine
from .server_events import TextEvents, event
from .tokenizer import JsonObject


class ChatCompletion:
    """One request to the endpoint, made by `start`. `whole` or `events` is used once."""

    def __init__(
        self, engine: LocalEngine, body: ChatRequest, model: str, submit: Submit, style: AnswerStyle, num_answers: int
    ) -> None:
        self._engine = engine
        self._body = body
        self._model = model
        self._submits = [submit]
        self._style = style
        self._n = num_answers
        self._created = int(time.time())

    @classmethod
    async def start(
        cls, engine: LocalEngine, body: ChatRequest, model: str, tool_parser: ParserName, has_reasoning: bool
    ) -> ChatCompletion:
        """Check everything and make the prompt; nothing runs yet."""
        forced = _forced_tools(body)
        constraint = structured_params(body)
        if forced is not None:
            if constraint:
                raise RequestError("tool_choice forces a call while response_format wants something else: give one")
            constraint = {"structured_outputs": StructuredOutputsParams(json=forced)}
        num_answers = num_choices(body)
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true")
        params = sampling_params(
            body,
            max_tokens=chat_max_tokens(body),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            logit_bias=logit_bias(body),
            **constraint,
        )
        if chat_max_tokens(body) is None:
            params = params.replace(max_tokens=None)  # to the end of the model's length
        has_tools = bool(body.tools) and body.tool_choice != "none"
        template = engine.inputs.chat_template
        if has_tools and forced is None and template is not None and "tools" not in template.source:
            raise RequestError(
                "tools cannot be shown to this model, whose chat template has no place for them: use tool_choice "
                "required or a named function, or start with --chat-template FILE"
            )
        prompt = await encode_messages(engine.inputs, body, has_tools)
        style = AnswerStyle(
            tool_parser=tool_parser if has_tools else "none",
            is_forced=forced is not None,
            forced_name=body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None,
            has_reasoning=has_reasoning and forced is None,
            prompt=prompt.text or "",
            max_calls=1 if body.parallel_tool_calls is False else None,
        )
        submit = Submit(
            request_id=answer_id("chatcmpl", body.request_id), params=params, prompt_token_ids=prompt.token_ids
        )
        return cls(engine, body, model, submit, style, num_answers)

    @property
    def id(self) -> str:
        return self._submits[0].request_id

    def run(self) -> Run:
        return Run(self._engine, self._submits, self._n)

    async def pieces(self, run: Run) -> AsyncGenerator[list[tuple[Piece, Delta]], None]:
        """The only answer of an entered run, read piece by piece."""
        text = AnswerText(self._style)
        async for news in run.news():
            read = []
            for _, delta in news:
                piece = text.append(delta.text)
                read.append((piece if delta.finish_reason is None else piece.joined(text.finish()), delta))
            yield read

    async def whole(self) -> bytes:
        async with self.run() as run:
            choices = [_Choice(self._body, AnswerText(self._style)) for _ in range(run.num_choices)]
            async for news in run.news():
                for index, delta in news:
                    choices[index].add(delta)
            built = [choice.build(index) for index, choice in enumerate(choices)]
            return encode_json(self._envelope("chat.completion", built, run.usage()))

    async def events(self) -> AsyncGenerator[bytes, None]:
        options = self._body.stream_options
        with_usage = bool(options and options.include_usage)
        in_every = bool(options and options.continuous_usage_stats)
        async with self.run() as run:
            texts = [AnswerText(self._style) for _ in range(run.num_choices)]
            has_begun = [False] * run.num_choices
            plain = self._text_events(texts, with_usage)
            async for news in run.news():
                if plain and len(news) == 1:
                    index, delta = news[0]
                    if has_begun[index] and delta.finish_reason is None:
                        if delta.text:
                            yield plain[index].event(delta.text)
                        continue
                choices: list[JsonObject] = []
                for index, delta in news:
                    if not has_begun[index]:
                        has_begun[index] = True
                        choices.append(_chunk(index, {"role": "assistant", "content": ""}))
                    choices += self._chunks(index, delta, texts[index])
                usage = run.usage() if in_every else None
                if choices:
                    yield b"".join(
                        event(self._envelope("chat.completion.chunk", [choice], usage, with_null=with_usage))
                        for choice in choices
                    )
            if with_usage:
                yield event(self._envelope("chat.completion.chunk", [], run.usage()))

    def _text_events(self, texts: list[AnswerText], with_null: bool) -> list[TextEvents]:
        """For the events that carry content alone, by choice; none where all carry more or text is not content."""
        body = self._body
        has_more = (
            body.logprobs
            or body.return_token_ids
            or (body.stream_options and body.stream_options.continuous_usage_stats)
        )
        if has_more or not all(text.is_plain for text in texts):
            return []

        def body_of(index: int, text: str) -> JsonObject:
            return self._envelope("chat.completion.chunk", [_chunk(index, {"content": text})], None, with_null)

        return [TextEvents(partial(body_of, index)) for index in range(len(texts))]

    def _chunks(self, index: int, delta: Delta, text: AnswerText) -> list[JsonObject]:
        """What a delta of the engine is to the client: mostly one chunk; with calls or the end, another."""
        piece = text.append(delta.text)
        if delta.finish_reason is not None:
            piece = piece.joined(text.finish())
        message: JsonObject = {}
        if piece.reasoning and self._body.include_reasoning is not False:
            message["reasoning_content"] = piece.reasoning
        if piece.content:
            message["content"] = piece.content
        if piece.calls:
            first = text.num_calls - len(piece.calls)
            message["tool_calls"] = [
                {"index": first + position} | call.to_json() for position, call in enumerate(piece.calls)
            ]
        chunk = _chunk(index, message)
        has_more = False
        if self._body.logprobs:
            chunk["logprobs"] = {"content": chat_logprobs(delta)}
            has_more = bool(delta.token_ids)
        if self._body.return_token_ids:
            chunk["token_ids"] = decode_ids(delta.token_ids).tolist()
            has_more = bool(delta.token_ids)
        chunks = [chunk] if message or has_more else []
        if delta.finish_reason is not None:
            chunks.append(_chunk(index, {}, text.finish_reason(delta), delta.stop_reason))
        return chunks

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


class _Choice:
    """An answer that is collected to be sent whole."""

    def __init__(self, body: ChatRequest, text: AnswerText) -> None:
        self._body = body
        self._text = text
        self._piece = Piece()
        self._logprobs: list[JsonObject] = []
        self._token_ids: list[int] = []
        self._last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self._last = delta
        self._piece = self._piece.joined(self._text.append(delta.text))
        if delta.finish_reason is not None:
            self._piece = self._piece.joined(self._text.finish())
        self._logprobs += chat_logprobs(delta)
        if self._body.return_token_ids:
            self._token_ids += decode_ids(delta.token_ids)

    def build(self, index: int) -> JsonObject:
        assert self._last is not None, "every choice has ended"
        piece = self._piece
        message: JsonObject = {"role": "assistant", "content": piece.content, "refusal": None}
        if piece.reasoning and self._body.include_reasoning is not False:
            message["reasoning_content"] = piece.reasoning
        if piece.calls:
            message["tool_calls"] = [call.to_json() for call in piece.calls]
            message["content"] = piece.content.strip() or None
        choice: JsonObject = {
            "index": index,
            "message": message,
            "logprobs": {"content": self._logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": self._text.finish_reason(self._last),
            "stop_reason": self._last.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = self._token_ids
        return choice


def _chunk(
    index: int, message: JsonObject, finish_reason: str | None = None, stop_reason: int | str | None = None
) -> JsonObject:
    chunk: JsonObject = {"index": index, "delta": message, "logprobs": None, "finish_reason": finish_reason}
    if finish_reason is not None:
        chunk["stop_reason"] = stop_reason
    return chunk


def _forced_tools(body: ChatRequest) -> JsonObject | None:
    """The schema of an answer that must be calls; None where the model may choose."""
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        return None
    parameters_by_name = {
        tool.function.name: tool.function.parameters or {"type": "object", "properties": {}}
        for tool in body.tools or ()
    }
    name = choice.function.name if isinstance(choice, NamedTool) else None
    if not parameters_by_name:
        raise RequestError("tool_choice forces a call, but tools is empty: give the tools")
    if name is not None and name not in parameters_by_name:
        raise RequestError(f"tool_choice names {name!r:.80}, tools has {', '.join(parameters_by_name)}")
    return forcing_schema(parameters_by_name, name, is_parallel=body.parallel_tool_calls is not False)
