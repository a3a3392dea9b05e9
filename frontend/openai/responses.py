"""/v1/responses: OpenAI's newer form of a chat, made of the same parts: input items in, output items out.

A request is rewritten as a chat; its answer's parts become items (reasoning, message, function calls), each opened,
filled and closed by events. Nothing is stored: a conversation goes on by sending its items again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator

from ...ipc.codec import JsonObject
from .chat import ChatCompletion
from .forms.errors import encode_json
from .forms.items import ItemWriter
from .forms.logprobs import chat_logprobs
from .forms.params import under_its_own_name
from .forms.response_body import ResponsesRequest

_SHOWN = ("temperature", "top_p", "top_logprobs", "presence_penalty", "frequency_penalty", "max_tool_calls", "user")


class ResponseCreation:
    """One request to the endpoint, which `chat` answers. `whole` or `events` is used once."""

    stream_end = b""

    def __init__(self, body: ResponsesRequest, model: str, chat: ChatCompletion) -> None:
        self._body = body
        self._model = model
        self._chat = chat
        self._created = int(time.time())
        self._id = "resp_" + chat.id.partition("-")[2]
        self._sequence = 0

    async def whole(self) -> bytes:
        last: JsonObject = {}
        async for kind, fields in self._progress():
            if kind in ("response.completed", "response.incomplete"):
                last = fields
        return encode_json(last["response"])

    async def events(self) -> AsyncGenerator[bytes, None]:
        async for kind, fields in self._progress():
            body = {"type": kind, "sequence_number": self._sequence, **fields}
            self._sequence += 1
            yield b"event: " + kind.encode() + b"\ndata: " + encode_json(body) + b"\n\n"

    async def _progress(self) -> AsyncGenerator[tuple[str, JsonObject], None]:
        """Every event in order, as (type, its fields)."""
        writer, with_ids = ItemWriter(secrets.token_hex(12)), bool(self._body.return_tokens_as_token_ids)
        with under_its_own_name("input", r"messages\b"), self._chat.run() as run:
            begun = False
            finish_reason: str | None = None
            async for read in self._chat.parts(run):
                if not begun:
                    begun = True
                    yield "response.created", {"response": self._response("in_progress", [], None)}
                    yield "response.in_progress", {"response": self._response("in_progress", [], None)}
                for parts, delta in read:
                    finish_reason = delta.finish_reason or finish_reason
                    for event in writer.write(parts, chat_logprobs(delta, with_ids=with_ids)):
                        yield event
            for event in writer.close():
                yield event
            usage = _usage(run.usage())
            is_whole = finish_reason == "stop"
            response = self._response("completed" if is_whole else "incomplete", writer.items, usage)
            if not is_whole:
                reason = "max_output_tokens" if finish_reason == "length" else finish_reason
                response["incomplete_details"] = {"reason": reason}
            yield "response.completed" if is_whole else "response.incomplete", {"response": response}

    def _response(self, status: str, output: list[JsonObject], usage: JsonObject | None) -> JsonObject:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": output,
            "usage": usage,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            **{name: getattr(body, name) for name in _SHOWN},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "truncation": "disabled",
            "text": body.text or {"format": {"type": "text"}},
        }


def _usage(usage: JsonObject) -> JsonObject:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
