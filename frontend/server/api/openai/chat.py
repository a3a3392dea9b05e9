"""ChatCompletion: the response of /v1/chat/completions, the assistant's next message, as a whole or as events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator

import msgspec

from .....ipc.codec import JsonObject, decode_ids
from .....ipc.errors import RequestError
from .....ipc.messages.client import Delta, Submit, ThoughtTexts
from .....ipc.params.sampling_params import SamplingParams
from ....forms.openai.calls.constraints import (
    behind_own_thought,
    call_token,
    forced_json,
    new_style,
    own_form_calls,
    strict_without_effect,
    tools_field,
)
from ....forms.openai.calls.message import message_of
from ....forms.openai.logprobs import TokenBytes, chat_logprobs, prompt_logprob_dicts
from ....forms.openai.messages import shows_tools, with_allowed_tools
from ....forms.openai.params import chat_max_tokens, errors_about, sampling_params, structured_outputs
from ....forms.openai.prompts import answer_id
from ....forms.openai.schema import ChatRequest
from ....forms.openai.text import AnswerStyle, AnswerText
from ....forms.parsers.parts import Arguments, CallBegin, Content, Part, Thought
from ...bodies.body_parser import ParsedBody
from ...prompts.thought_markers import thought_texts
from ..continuation import current
from ..response_warnings import warn
from .choices import Choice, ChoicesResponse
from .local_engine import LocalEngine
from .run import Run

_UNSAID: JsonObject = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))  # vLLM's keys


class ChatCompletion(ChoicesResponse):
    """Response to one request for a chat completion. Created by `start`."""

    kind, chunk_kind, prompt_field, streams_empty_text = "chat.completion", "chat.completion.chunk", "messages", False

    def __init__(
        self, engine: LocalEngine, body: ChatRequest, model: str, submit: Submit, style: AnswerStyle, echoed: str
    ) -> None:
        """`echoed`: the text at the start of each answer that the request asks to repeat ("" for none)."""
        super().__init__(engine, body, model, submit.request_id, [submit])
        self._echoed = echoed
        self._body = body
        self._style = style
        if style.is_forced or style.is_in_form:
            self._constraint_field = tools_field(body)

    @classmethod
    async def start(
        cls,
        engine: LocalEngine,
        parsed: ParsedBody[ChatRequest],
        model: str,
    ) -> ChatCompletion:
        """Check all fields, make the prompt and return the response; `whole` or `events` starts the generation.
        RequestError for invalid fields, or if the chat template refuses the chat."""
        body = with_allowed_tools(parsed.body)
        forced, params = forced_json(body), chat_params(body)
        cut_side = engine.inputs.limits.cut_side(params.truncate_prompt_tokens, params.truncation_side)
        prompt = await engine.chat_prompt(parsed, cut_side)
        form = await engine.answer_form(body.chat_template)  # behind the prompt, which a template not to be taken ends
        if not shows_tools(body):
            form = form.without_calls()
        thoughts_of_form = engine.inputs.thoughts.of_form(form)
        is_inside = thoughts_of_form.are_open(prompt.token_ids or b"")
        may_think = not body.continue_final_message and thoughts_of_form.may_be_opened(prompt.token_ids or b"")
        if body.continue_final_message:
            form = form.continued()
            if forced is None:
                is_inside = prompt.is_inside_thought
        token = call_token(form, engine.inputs.is_added_token)
        own = own_form_calls(body, params, form, token, is_inside=is_inside, may_think=may_think)
        if own is not None:
            params = params.replace(structured_outputs=own)
        elif why := strict_without_effect(body, params, form):
            warn(why)
        if may_think:
            params = behind_own_thought(params, form)
        style = new_style(body, form, forced, own, is_inside=is_inside, may_think=may_think)
        thoughts: ThoughtTexts | None = None
        if body.chat_template is not None:
            thoughts = thought_texts(style.form)
        submit = Submit(
            request_id=answer_id("chatcmpl", body.request_id, current().digits("id")),
            params=params,
            prompt_token_ids=prompt.token_ids,
            media=prompt.media,
            chat_fields=prompt.chat_fields,
            thoughts=thoughts,
            shown_token_ids=engine.inputs.special_ids_of(style.markers),
        )
        return cls(engine, body, model, submit, style, prompt.text or "")

    @contextlib.contextmanager
    def run(self) -> Iterator[Run]:
        with errors_about("top_logprobs", r"logprobs\b"), super().run() as run:
            yield run

    def _prompt_fields(self, run: Run, choice: Choice) -> JsonObject:
        most = self._body.prompt_logprobs
        logprobs = None if most is None else prompt_logprob_dicts(choice.prompt_logprobs, most)
        return {"prompt_logprobs": logprobs, "prompt_token_ids": None} | self._first_chunk_fields(run)

    def _first_chunk_fields(self, run: Run) -> JsonObject:
        return {"prompt_token_ids": decode_ids(run.prompt_ids(0)).tolist()} if self._body.return_token_ids else {}

    def choice(self, index: int, run: Run) -> ChatChoice:
        return ChatChoice(index, self._body, self._new_text(index), self._echoed, run, self._engine.inputs.token_bytes)

    def _new_text(self, choice: int) -> AnswerText:
        def digits(position: int) -> str:
            return self._continuation.digits(f"call {choice} {position}", 24)

        return AnswerText(self._style, self._engine.on_unparsed, digits)

    def _choices(self, run: Run) -> list[ChatChoice]:
        return [self.choice(index, run) for index in range(run.num_choices)]

    async def parts(self, run: Run) -> AsyncGenerator[list[tuple[list[Part], Delta]], None]:
        """Yield each delta of the only answer with its parts, in lists as `Run.deltas` yields them. `run`: the value of
        the entered `self.run()`."""
        text = self._new_text(0)
        async for deltas in run.deltas():
            read = [(text.read(delta), delta) for _, delta in deltas]
            run.num_thought_tokens = text.num_thought_tokens
            yield read


class ChatChoice(Choice):
    def __init__(
        self, index: int, body: ChatRequest, text: AnswerText, echoed: str, run: Run, token_bytes: TokenBytes
    ) -> None:
        self._text = text
        self._token_bytes = token_bytes
        super().__init__(index, run, is_plain=self._text.is_plain and not body.logprobs)
        self._body, self._echoed = body, echoed
        self._has_functions = bool(body.functions)  # the older form of tools, with `function_call` in the message
        self._parts: list[Part] = []

    def add(self, delta: Delta) -> None:
        super().add(delta)
        self._parts += self._read(delta)

    def _read(self, delta: Delta) -> list[Part]:
        num_before = self._text.num_thought_tokens
        parts = self._text.read(delta)
        self._run.num_thought_tokens += self._text.num_thought_tokens - num_before
        return parts

    def build(self) -> JsonObject:
        said = message_of([Content(self._echoed), *self._parts], is_forced=self._text.is_forced)
        calls = said.pop("tool_calls", None)
        message: JsonObject = {**_UNSAID, **said, **self._thought(self._parts)}
        if calls:
            message |= self._called(calls)
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

    def opening(self) -> list[JsonObject]:
        role = self._chunk({"role": "assistant", "content": ""})
        return [role, self.text_chunk(self._echoed)] if self._echoed else [role]

    def chunk(self, delta: Delta) -> JsonObject | None:
        parts = self._read(delta)
        message = self._thought(parts)
        if content := "".join(part.text for part in parts if isinstance(part, Content)):
            message["content"] = content
        if calls := self._call_deltas(parts):
            message |= self._called(calls)
        chunk = self._chunk(message)
        has_more = False
        if self._body.logprobs:
            chunk["logprobs"] = {"content": self._logprobs(delta), "refusal": None}
            has_more = bool(delta.token_ids)
        if self._body.return_token_ids:
            chunk["token_ids"] = decode_ids(delta.token_ids).tolist()
            has_more = bool(delta.token_ids)
        if delta.finish_reason is not None:
            return chunk | self._end(delta)
        return chunk if message or has_more else None

    def _logprobs(self, delta: Delta) -> list[JsonObject]:
        return chat_logprobs(delta, self._token_bytes, with_ids=bool(self._body.return_tokens_as_token_ids))

    def _call_deltas(self, parts: list[Part]) -> list[JsonObject]:
        """Return one delta for each call that the parts begin or continue. The first delta of a call has its name and
        id."""
        calls: dict[int, dict[str, dict[str, str]]] = {}
        heads: dict[int, JsonObject] = {}
        index = self._text.num_calls - sum(isinstance(part, CallBegin) for part in parts) - 1
        for part in parts:
            if isinstance(part, CallBegin):
                index += 1
                kind, text = part.form
                heads[index] = {"id": part.id, "type": kind}
                calls[index] = {kind: {"name": part.name, text: ""}}
            elif isinstance(part, Arguments):
                kind, text = part.form
                calls.setdefault(index, {kind: {text: ""}})[kind][text] += part.text
        return [{"index": i, **heads.get(i, {}), **call} for i, call in calls.items()]

    def _called(self, calls: list[JsonObject]) -> JsonObject:
        """Return the message field that holds the calls, or pieces of them."""
        return {"function_call": calls[0]["function"]} if self._has_functions else {"tool_calls": calls}

    def _thought(self, parts: list[Part]) -> JsonObject:
        """Return the reasoning in `parts` in vLLM's current and former field; {} if there is none or the request
        excludes it."""
        thought = "".join(part.text for part in parts if isinstance(part, Thought))
        shows = thought and self._body.include_reasoning is not False
        return {"reasoning": thought, "reasoning_content": thought} if shows else {}

    def _end(self, last: Delta) -> JsonObject:
        reason = self._text.finish_reason(last)
        reason = "function_call" if reason == "tool_calls" and self._has_functions else reason
        return {"finish_reason": reason, "stop_reason": last.stop_reason}

    def text_chunk(self, text: str) -> JsonObject:
        return self._chunk({"content": text})

    def _chunk(self, message: JsonObject) -> JsonObject:
        return {"index": self._index, "delta": message, "logprobs": None, "finish_reason": None}


def chat_params(body: ChatRequest) -> SamplingParams:
    """Return the sampling parameters of a chat. RequestError for invalid or contradictory fields. `body`: a result of
    `with_allowed_tools`."""
    forced = forced_json(body)
    if forced is not None and structured_outputs(msgspec.structs.replace(body, response_format=None)) is not None:
        raise RequestError("tool_choice forces a call while structured_outputs wants something else: give one")
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true")
    max_tokens = chat_max_tokens(body)
    with errors_about("top_logprobs", r"logprobs\b"):
        params = sampling_params(
            body,
            max_tokens=max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured_outputs=forced,
        )
    return params if max_tokens is not None else params.replace(max_tokens=None)  # up to the model's length
