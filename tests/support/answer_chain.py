"""An answer's way through each API: the text that a model wrote, to the client, and back into the next prompt.

All but the engine is the product: the parsers of the form, the responses of the APIs, whole and streamed, the readers
of request bodies, and the chat template. A client sends back what it got, as the official clients do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from tokenloom.frontend.forms.answer_forms.form import AnswerForm
from tokenloom.frontend.forms.anthropic.request_body import MessagesRequest
from tokenloom.frontend.forms.anthropic.request_body import chat_request as chat_of_messages
from tokenloom.frontend.forms.media_limits import MediaLimits
from tokenloom.frontend.forms.ollama.request_body import OllamaMessage, message_of
from tokenloom.frontend.forms.openai.messages import ChatInput, chat_input
from tokenloom.frontend.forms.openai.response_body import ResponsesRequest
from tokenloom.frontend.forms.openai.response_body import chat_request as chat_of_response
from tokenloom.frontend.forms.openai.schema import ChatRequest
from tokenloom.frontend.forms.openai.text import AnswerStyle
from tokenloom.frontend.server.api.anthropic import MessageCreation
from tokenloom.frontend.server.api.ollama import OllamaAnswer
from tokenloom.frontend.server.api.openai.chat import ChatCompletion
from tokenloom.frontend.server.api.openai.chat_batch import ChatBatch
from tokenloom.frontend.server.api.openai.responses import ResponseCreation
from tokenloom.frontend.server.api.openai.run import Run
from tokenloom.ipc.codec import JsonObject, encode_ids
from tokenloom.ipc.messages.client import Delta, Submit
from tokenloom.ipc.params.sampling_params import SamplingParams

QUESTION, RESULT = "Zhquestion", "Zhresult"
TOKEN = encode_ids([0])  # of each delta: one without tokens has facts of the prompt alone
LIMITS: Any = MediaLimits(model="m", kind=None, off_by={}, max_count=None, max_bytes=0)


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that a model wrote, and the request that it answers."""

    form: AnswerForm
    text: str
    is_inside_thought: bool
    function: JsonObject  # the only tool: name, description, parameters
    variables: JsonObject  # of the chat template
    piece: int = 3  # characters of a delta

    @property
    def tools(self) -> list[JsonObject]:
        return [{"type": "function", "function": self.function}]

    def run(self, make: Callable[[Any, ChatCompletion], Any], *, is_stream: bool) -> bytes:
        """Return the body or the events of a response that is made of an engine and a chat."""
        style = AnswerStyle(
            form=self.form,
            schemas={self.function["name"]: self.function["parameters"]},
            is_forced=False,
            forced_name=None,
            is_inside_thought=self.is_inside_thought,
            max_calls=None,
        )
        engine: Any = SimpleNamespace(
            run=self._run, inputs=SimpleNamespace(token_bytes=None), has_timings=False, on_unparsed=lambda call: None
        )
        body = msgspec.convert({"messages": [{"role": "user", "content": QUESTION}]}, ChatRequest)
        submit = Submit(request_id="chatcmpl-1", params=SamplingParams())
        chat = ChatCompletion(engine, body, "m", submit, style, "")

        async def read() -> bytes:
            response = make(engine, chat)
            if is_stream:
                return b"".join([each async for each in response.events()]) + bytes(response.end())
            return bytes(await response.whole())

        return asyncio.run(read())

    @contextlib.contextmanager
    def _run(self, submits: Sequence[Submit], *_: object) -> Iterator[Run]:
        run = Run(1, 1)
        pieces = [self.text[start : start + self.piece] for start in range(0, len(self.text), self.piece)]
        for piece in pieces:
            run.put(0, Delta(request_id="r", text=piece, token_ids=TOKEN))
        run.put(0, Delta(request_id="r", finish_reason="stop"))
        yield run


Way = Callable[[Scene], ChatInput]


def _events(body: bytes) -> Iterator[Any]:
    for line in body.decode().splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _next_chat(scene: Scene, message: JsonObject) -> ChatInput:
    calls: Any = message.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls]
    turns = [{"role": "user", "content": QUESTION}, message, *(results or [{"role": "user", "content": QUESTION}])]
    body = {"messages": turns, "tools": scene.tools, "chat_template_kwargs": scene.variables}
    return chat_input(msgspec.convert(body, ChatRequest), LIMITS)


def chat(scene: Scene) -> ChatInput:
    (choice,) = json.loads(scene.run(lambda engine, chat: chat, is_stream=False))["choices"]
    return _next_chat(scene, choice["message"])


def chat_batch(scene: Scene) -> ChatInput:
    body = scene.run(lambda engine, chat: ChatBatch([chat], "chatcmpl-1"), is_stream=False)
    return _next_chat(scene, json.loads(body)["choices"][0]["message"])


def chat_stream(scene: Scene) -> ChatInput:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, Any] = {}
    for event in _events(scene.run(lambda engine, chat: chat, is_stream=True)):
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    calls[call["index"]] = call
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        message |= {"tool_calls": list(calls.values()), "content": message["content"] or None}
    return _next_chat(scene, message)


def _response(engine: Any, chat: ChatCompletion) -> ResponseCreation:
    return ResponseCreation(engine, msgspec.convert({"input": QUESTION}, ResponsesRequest), chat)


def _next_response(scene: Scene, output: list[Any]) -> ChatInput:
    calls = [each for each in output if each["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": RESULT} for call in calls]
    question = {"role": "user", "content": QUESTION}
    body = {
        "input": [question, *output, *(results or [question])],
        "tools": [{"type": "function", **scene.function}],
        "chat_template_kwargs": scene.variables,
    }
    return chat_input(chat_of_response(msgspec.convert(body, ResponsesRequest)), LIMITS)


def response(scene: Scene) -> ChatInput:
    return _next_response(scene, json.loads(scene.run(_response, is_stream=False))["output"])


def response_stream(scene: Scene) -> ChatInput:
    output: list[Any] = []
    for event in _events(scene.run(_response, is_stream=True)):
        if event["type"] == "response.output_item.added":
            output.append({**event["item"], "text": ""})
        elif event["type"].endswith(".delta"):
            output[event["output_index"]]["text"] += event["delta"]
    for item in output:
        text = item.pop("text")
        if item["type"] == "function_call":
            item["arguments"] = text
        else:
            item["content"] = [{"type": {"message": "output_text"}.get(item["type"], "reasoning_text"), "text": text}]
    return _next_response(scene, output)


def _message(engine: Any, chat: ChatCompletion) -> MessageCreation:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": QUESTION}]}
    return MessageCreation(msgspec.convert(body, MessagesRequest), chat)


def _next_message(scene: Scene, content: list[Any]) -> ChatInput:
    calls = [each for each in content if each["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": RESULT} for call in calls]
    name, description, schema = (scene.function[each] for each in ("name", "description", "parameters"))
    body = {
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": content},
            {"role": "user", "content": results or QUESTION},
        ],
        "tools": [{"name": name, "description": description, "input_schema": schema}],
        "chat_template_kwargs": scene.variables,
    }
    return chat_input(chat_of_messages(msgspec.convert(body, MessagesRequest)), LIMITS)


def message(scene: Scene) -> ChatInput:
    return _next_message(scene, json.loads(scene.run(_message, is_stream=False))["content"])


def message_stream(scene: Scene) -> ChatInput:
    content: list[Any] = []
    texts: list[str] = []
    fields = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    for event in _events(scene.run(_message, is_stream=True)):
        if event["type"] == "content_block_start":
            content.append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta" and event["delta"]["type"] in fields:
            texts[-1] += event["delta"][fields[event["delta"]["type"]]]
    for block, text in zip(content, texts, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
        else:
            block[block["type"]] = text
    return _next_message(scene, content)


def _next_ollama(scene: Scene, message: Any) -> ChatInput:
    """A client may name no call beside a result."""
    results = [{"role": "tool", "content": RESULT} for _ in message.get("tool_calls", ())]
    question = {"role": "user", "content": QUESTION}
    turns = [question, {"role": "assistant", **message}, *(results or [question])]
    body = {
        "messages": list(map(message_of, msgspec.convert(turns, list[OllamaMessage]))),
        "tools": scene.tools,
        "chat_template_kwargs": scene.variables,
    }
    return chat_input(msgspec.convert(body, ChatRequest), LIMITS)


def ollama(scene: Scene) -> ChatInput:
    body = scene.run(lambda engine, chat: OllamaAnswer(chat, "m", is_chat=True), is_stream=False)
    return _next_ollama(scene, json.loads(body)["message"])


WAYS: dict[str, Way] = {
    "chat": chat,
    "chat, streamed": chat_stream,
    "chats in a batch": chat_batch,
    "response": response,
    "response, streamed": response_stream,
    "message": message,
    "message, streamed": message_stream,
    "Ollama's chat": ollama,
}
