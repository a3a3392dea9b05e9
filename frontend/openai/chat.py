"""/v1/chat/completions: a conversation in, the assistant's next turn out, whole or as events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from functools import reduce

import msgspec

from ...ipc.codec import JsonObject, decode_ids
from ...ipc.errors import RequestError
from ...ipc.messages.client import Delta, Submit
from ...ipc.structured_outputs import StructuredOutputsParams
from ..intake.body_parser import ParsedBody
from .answers import Answers, Choice
from .forms.logprobs import chat_logprobs, prompt_logprob_dicts
from .forms.messages import shows_tools
from .forms.params import chat_max_tokens, sampling_params, structured_outputs, under_its_own_name
from .forms.prompts import answer_id
from .forms.schema import ChatRequest, NamedTool
from .forms.text import AnswerStyle, AnswerText, Piece
from .forms.tools import ParserName, forcing_schema
from .local_engine import LocalEngine, Run

_UNSAID: JsonObject = {"refusal": None, "annotations": None, "audio": None, "function_call": None}  # OpenAI has these


class ChatCompletion(Answers):
    """One request to the endpoint, made by `start`."""

    kind, chunk_kind, tells_empty = "chat.completion", "chat.completion.chunk", False

    def __init__(self, engine: LocalEngine, body: ChatRequest, model: str, submit: Submit, style: AnswerStyle) -> None:
        super().__init__(engine, body, model, submit.request_id, [submit])
        self._body = body
        self._style = style

    @classmethod
    async def start(
        cls,
        engine: LocalEngine,
        parsed: ParsedBody[ChatRequest],
        model: str,
        tool_parser: ParserName,
        has_reasoning: bool,
    ) -> ChatCompletion:
        """Check everything and make the prompt; nothing runs yet."""
        body = parsed.body
        forced = _forced_tools(body)
        if forced is not None and structured_outputs(msgspec.structs.replace(body, response_format=None)) is not None:
            raise RequestError("tool_choice forces a call while structured_outputs wants something else: give one")
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true")
        with under_its_own_name("tools"):
            constraint = None if forced is None else StructuredOutputsParams(json=forced)
        with under_its_own_name("top_logprobs", r"logprobs\b"):
            params = sampling_params(
                body,
                max_tokens=chat_max_tokens(body),
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
                structured_outputs=constraint,
            )
        if chat_max_tokens(body) is None:
            params = params.replace(max_tokens=None)  # to the end of the model's length
        has_tools = shows_tools(body)
        template = engine.inputs.chat_template
        if has_tools and forced is None and template is not None and "tools" not in template.source:
            raise RequestError(
                "tools cannot be shown to this model, whose chat template has no place for them: use tool_choice "
                "required or a named function, or start with --chat-template FILE"
            )
        prompt = await engine.chat_prompt(parsed, engine.inputs.may_be_long(params))
        style = AnswerStyle(
            tool_parser=tool_parser if has_tools else "none",
            is_forced=forced is not None,
            forced_name=body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None,
            has_reasoning=has_reasoning and forced is None,
            is_inside_thought=prompt.is_inside_thought,
            max_calls=1 if body.parallel_tool_calls is False else None,
        )
        submit = Submit(
            request_id=answer_id("chatcmpl", body.request_id), params=params, prompt_token_ids=prompt.token_ids
        )
        return cls(engine, body, model, submit, style)

    @contextlib.contextmanager
    def run(self) -> Iterator[Run]:
        with under_its_own_name("top_logprobs", r"logprobs\b"), super().run() as run:
            yield run

    def _of_prompt(self, run: Run, choice: Choice) -> JsonObject:
        most = self._body.prompt_logprobs
        told = {"prompt_logprobs": None if most is None else prompt_logprob_dicts(choice.prompt_logprobs, most)}
        return told | {"prompt_token_ids": None} | self._at_start(run)

    def _at_start(self, run: Run) -> JsonObject:
        prompt = run.prompt_of(0)
        if prompt is None or not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": decode_ids(prompt.prompt_token_ids).tolist()}

    def _choices(self, run: Run) -> list[_Choice]:
        return [_Choice(index, self._body, self._style) for index in range(run.num_choices)]

    async def pieces(self, run: Run) -> AsyncGenerator[list[tuple[Piece, Delta]], None]:
        """The only answer of an entered run, read piece by piece."""
        text = AnswerText(self._style)
        async for news in run.news():
            yield [(text.read(delta), delta) for _, delta in news]


class _Choice(Choice):
    def __init__(self, index: int, body: ChatRequest, style: AnswerStyle) -> None:
        super().__init__()
        self._index = index
        self._body = body
        self._text = AnswerText(style)
        self.is_plain = self._text.is_plain and not body.logprobs

    def build(self) -> JsonObject:
        texts = ["".join(self.texts)] if self._text.is_plain else self.texts
        piece = reduce(Piece.joined, [*map(self._text.append, texts), self._text.finish()])
        message: JsonObject = {"role": "assistant", "content": piece.content, **_UNSAID, **self._thought(piece)}
        if piece.calls:
            message["tool_calls"] = [call.to_json() for call in piece.calls]
            message["content"] = piece.content.strip() or None
        logprobs = [each for delta in self.with_logprobs for each in self._logprobs(delta)]
        choice: JsonObject = {
            "index": self._index,
            "message": message,
            "logprobs": {"content": logprobs, "refusal": None} if self._body.logprobs else None,
            **self._end(self.last),
            "token_ids": None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = decode_ids(bytes(self.token_ids)).tolist()
        return choice

    def chunks(self, delta: Delta) -> list[JsonObject]:
        """Mostly one chunk; with the begin or the end, another."""
        chunks = [] if self.has_begun else [self._chunk({"role": "assistant", "content": ""})]
        piece = self._text.read(delta)
        message = self._thought(piece)
        if piece.content:
            message["content"] = piece.content
        if piece.calls:
            first = self._text.num_calls - len(piece.calls)
            message["tool_calls"] = [
                {"index": first + position} | call.to_json() for position, call in enumerate(piece.calls)
            ]
        chunk = self._chunk(message)
        has_more = False
        if self._body.logprobs:
            chunk["logprobs"] = {"content": self._logprobs(delta)}
            has_more = bool(delta.token_ids)
        if self._body.return_token_ids:
            chunk["token_ids"] = decode_ids(delta.token_ids).tolist()
            has_more = bool(delta.token_ids)
        if message or has_more:
            chunks.append(chunk)
        if delta.finish_reason is not None:
            chunks.append(self._chunk({}) | self._end(delta))
        return chunks

    def _logprobs(self, delta: Delta) -> list[JsonObject]:
        return chat_logprobs(delta, with_ids=bool(self._body.return_tokens_as_token_ids))

    def _thought(self, piece: Piece) -> JsonObject:
        shows = piece.reasoning and self._body.include_reasoning is not False
        return {"reasoning_content": piece.reasoning} if shows else {}

    def _end(self, last: Delta) -> JsonObject:
        return {"finish_reason": self._text.finish_reason(last), "stop_reason": last.stop_reason}

    def text_chunk(self, text: str) -> JsonObject:
        return self._chunk({"content": text})

    def _chunk(self, message: JsonObject) -> JsonObject:
        return {"index": self._index, "delta": message, "logprobs": None, "finish_reason": None}


def _forced_tools(body: ChatRequest) -> JsonObject | None:
    """The schema of an answer that must be calls; None where the model may choose."""
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        return None
    parameters_by_name = {tool.function.name: tool.function.schema for tool in body.tools or ()}
    name = choice.function.name if isinstance(choice, NamedTool) else None
    if not parameters_by_name:
        raise RequestError("tool_choice forces a call, but tools is empty: give the tools")
    if name is not None and name not in parameters_by_name:
        raise RequestError(f"tool_choice names {name!r:.80}, tools has {', '.join(parameters_by_name)}")
    return forcing_schema(parameters_by_name, name, is_parallel=body.parallel_tool_calls is not False)
