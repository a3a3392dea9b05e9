"""/v1/responses: OpenAI's newer form of a chat, made of the same parts: input items in, output items out.

A request is rewritten as a chat; its answer's parts become items (reasoning, message, function calls), each opened,
filled and closed by events.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from typing import Any

from ...ipc.codec import JsonObject, decode_ids
from .chat import ChatCompletion
from .forms.errors import encode_json
from .forms.items import Event, ItemWriter
from .forms.logprobs import chat_logprobs
from .forms.params import errors_about
from .forms.response_body import ResponsesRequest
from .local_engine import LocalEngine, Run

BEGIN = ("response.created", "response.in_progress")
_SHOWN = ("temperature", "top_p", "top_logprobs", "presence_penalty", "frequency_penalty", "max_tool_calls", "user")


class ResponseCreation:
    """One request to the endpoint, which `chat` answers. One of `whole`, `events` and `progress` is used, once."""

    stream_end = b""

    def __init__(
        self,
        engine: LocalEngine,
        body: ResponsesRequest,
        model: str,
        chat: ChatCompletion,
        keep: Callable[[dict[str, Any]], Awaitable[bool]] | None = None,
        created: int | None = None,
    ) -> None:
        """`keep` gets the response before the caller does, and returns whether it is stored."""
        self._engine = engine
        self._body = body
        self._model = model
        self._chat = chat
        self._keep = keep
        self._created = int(time.time()) if created is None else created
        self.id = response_id(chat.id)
        self._writer = ItemWriter(hashlib.sha256(self.id.encode()).hexdigest()[:24])

    async def whole(self) -> bytes:
        last: JsonObject = {}
        async for turn in self.progress():
            last = turn[-1][1] if turn else last
        return encode_json(last["response"])

    async def events(self) -> AsyncGenerator[bytes, None]:
        sequence = 0
        async for turn in self.progress():
            if turn:
                yield b"".join(encode_events(turn, sequence))
                sequence += len(turn)

    async def progress(self) -> AsyncGenerator[list[Event], None]:
        """All events in order, those of a turn of the engine together."""
        with_ids = bool(self._body.return_tokens_as_token_ids)
        token_ids = bytearray()
        with errors_about("input", r"messages\b"), self._chat.run() as run:
            turn: list[Event] = [(kind, {"response": self.response("in_progress")}) for kind in BEGIN]
            finish_reason: str | None = None
            async for read in self._chat.parts(run):
                for parts, delta in read:
                    finish_reason = delta.finish_reason or finish_reason
                    token_ids += delta.token_ids
                    turn += self._writer.write(parts, chat_logprobs(delta, with_ids=with_ids))
                yield turn
                turn = []
            turn += self._writer.finish(is_whole=finish_reason == "stop")
            response = self._answered(run, finish_reason)
            if self._body.enable_response_messages:
                response |= await self._messages(run, bytes(token_ids))
            if self._keep is not None:
                response["store"] = await self._keep(response)
            yield [*turn, (f"response.{response['status']}", {"response": response})]

    def _answered(self, run: Run, finish_reason: str | None) -> JsonObject:
        response = self.response("completed" if finish_reason == "stop" else "incomplete") | {"usage": _usage(run)}
        if finish_reason != "stop":
            reason = "max_output_tokens" if finish_reason == "length" else finish_reason
            response["incomplete_details"] = {"reason": reason}
        return response

    async def _messages(self, run: Run, answer: bytes) -> JsonObject:
        """Prompt and answer as the model sees them, in vLLM's form."""
        prompt = run.prompt_of(0)
        sides = {"input": b"" if prompt is None else prompt.prompt_token_ids, "output": answer}
        told: JsonObject = {}
        for side, ids in sides.items():
            text = await self._engine.text_of(ids)
            told[f"{side}_messages"] = [
                {"type": "raw_message_tokens", "message": text, "tokens": decode_ids(ids).tolist()}
            ]
        return told

    def response(self, status: str) -> JsonObject:
        """With the items that have been closed."""
        body = self._body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": bool(body.background),
            "model": self._model,
            "output": list(self._writer.items),
            "usage": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": self._keep is not None or bool(body.background),
            **{name: getattr(body, name) for name in _SHOWN},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "truncation": "disabled",
            "text": body.text or {"format": {"type": "text"}},
        }


def response_id(chat_id: str) -> str:
    """Of the response that a chat answers."""
    return "resp_" + chat_id.partition("-")[2]


def encode_events(events: Iterable[Event], first: int) -> Iterator[bytes]:
    """Server-sent events, numbered from `first`."""
    for number, (kind, fields) in enumerate(events, first):
        body = {"type": kind, "sequence_number": number, **fields}
        yield b"event: " + kind.encode() + b"\ndata: " + encode_json(body) + b"\n\n"


def _usage(run: Run) -> JsonObject:
    usage = run.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
