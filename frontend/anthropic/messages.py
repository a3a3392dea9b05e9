"""/v1/messages: Anthropic's form of a chat, made of the same parts: turns of blocks in, a message of blocks out.

A request is rewritten as a chat; its answer's parts become blocks (thinking, text, tool_use), each opened, filled and
closed by events. The whole answer is made of the same blocks as the stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from ...ipc.codec import JsonObject
from ...ipc.messages.client import Delta
from ..openai.chat import ChatCompletion
from ..openai.forms.errors import encode_json, to_http_error
from ..openai.local_engine import Run
from .forms.blocks import BlockWriter, Event
from .forms.errors import message_error
from .forms.request_body import MessagesRequest


class MessageCreation:
    """One request to the endpoint, which `chat` answers. `whole` or `events` is used once."""

    stream_end = b""

    def __init__(self, body: MessagesRequest, model: str, chat: ChatCompletion, block_size: int) -> None:
        """`block_size`: tokens of a block of the prefix cache; 0 without one."""
        self._max_tokens, self._model, self._chat, self._block_size = body.max_tokens, model, chat, block_size
        self._id = "msg_" + chat.id.partition("-")[2]
        self._writer = BlockWriter()
        self._end: JsonObject = {"stop_reason": None, "stop_sequence": None}
        self._usage: JsonObject = {}

    async def whole(self) -> bytes:
        async for _ in self._progress():
            pass
        return encode_json(self._message())

    async def events(self) -> AsyncGenerator[bytes, None]:
        has_begun = False
        try:
            async with contextlib.aclosing(self._progress()) as progress:
                async for events in progress:
                    yield b"".join(_encode(kind, {"type": kind, **fields}) for kind, fields in events)
                    has_begun = True
        except Exception as error:
            if not has_begun:  # then it has a status
                raise
            yield _encode("error", message_error(to_http_error(error))[0])

    async def _progress(self) -> AsyncGenerator[list[Event], None]:
        """Every event in order, those of a turn together. Before the first tokens a request may yet be refused."""
        last = Delta(request_id="")
        with self._chat.run() as run:
            async for read in self._chat.parts(run):
                if not read:
                    continue
                events: list[Event] = []
                if not self._usage:
                    self._usage = {"input_tokens": run.num_prompt_tokens, "output_tokens": 0}
                    events += [("message_start", {"message": self._message()}), ("ping", {})]
                last = read[-1][1]
                yield events + [event for parts, _ in read for event in self._writer.write(parts)]
            closing = list(self._writer.close())
            self._usage = _usage(run, self._block_size)
            self._end = self._ending(last, run.num_completion_tokens)
        yield [*closing, ("message_delta", {"delta": self._end, "usage": self._usage}), ("message_stop", {})]

    def _message(self) -> JsonObject:
        message: JsonObject = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**message, "content": list(self._writer.blocks), **self._end, "usage": self._usage}

    def _ending(self, last: Delta, num_tokens: int) -> JsonObject:
        """Why the answer ended; for an end that Anthropic has no word for, the engine's."""
        reason, sequence = str(last.finish_reason), None
        if reason == "length":
            reason = "max_tokens" if num_tokens >= self._max_tokens else "model_context_window_exceeded"
        elif reason == "stop" and self._writer.has_calls:
            reason = "tool_use"
        elif reason == "stop":
            sequence = last.stop_reason if isinstance(last.stop_reason, str) else None
            reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}


def _encode(kind: str, body: object) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode_json(body) + b"\n\n"


def _usage(run: Run, block_size: int) -> JsonObject:
    """Tokens of the prompt in three parts: found in the cache, put there (the next equal prompt finds them), others."""
    num_prompt, num_read = run.num_prompt_tokens, run.num_cached_tokens
    num_kept = (num_prompt - 1) // block_size * block_size if block_size else 0
    num_created = max(0, num_kept - num_read)
    return {
        "input_tokens": num_prompt - num_read - num_created,
        "cache_creation_input_tokens": num_created,
        "cache_read_input_tokens": num_read,
        "output_tokens": run.num_completion_tokens,
        "output_tokens_details": {"thinking_tokens": run.num_thought_tokens},
    }
