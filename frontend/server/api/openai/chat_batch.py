"""ChatBatch: the response of /v1/chat/completions/batch, which has one choice for each of several chats."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .....ipc.codec import JsonObject
from .....ipc.errors import RequestError
from ....forms.openai.generation import MAX_PROMPTS
from ....forms.openai.params import refuse_unserved
from ....forms.openai.prompts import answer_id
from ....forms.openai.schema import BatchChatRequest
from ...bodies.body_parser import ParsedBody
from ..continuation import current
from .chat import ChatChoice, ChatCompletion
from .choices import Choice
from .local_engine import LocalEngine
from .run import Run


class ChatBatch(ChatCompletion):
    """Response to several chats in one request, never streamed. Created by `start_all`."""

    def __init__(self, chats: Sequence[ChatCompletion], request_id: str) -> None:
        first = chats[0]
        super().__init__(first._engine, first._body, first.model, first._submits[0], first._style, "")
        self.id, self._chats = request_id, chats
        submits = [submit for chat in chats for submit in chat._submits]
        self._submits = [
            msgspec.structs.replace(submit, request_id=f"{request_id}/{position}")
            for position, submit in enumerate(submits)
        ]

    @classmethod
    async def start_all(cls, engine: LocalEngine, parsed: ParsedBody[BatchChatRequest], model: str) -> ChatBatch:
        """Check all fields, make the prompts and return the response; `whole` starts the generation. RequestError if
        `messages` is empty or holds more than MAX_PROMPTS chats, or for an invalid field."""
        body, inputs = parsed.body, parsed.inputs
        refuse_unserved(body)
        if not 0 < len(body.messages) <= MAX_PROMPTS:
            raise RequestError(f"messages holds {len(body.messages)} chats: give 1 to {MAX_PROMPTS}")
        engine.inputs.limits.check_share(len(body.messages), 1)
        chats = []
        for position, chat in enumerate(body.chats):
            one = ParsedBody(chat, inputs[position : position + 1])
            chats.append(await ChatCompletion.start(engine, one, model))
        return cls(chats, answer_id("chatcmpl", body.request_id, current().digits("id")))

    def _choices(self, run: Run) -> list[ChatChoice]:
        return [chat.choice(index, run) for index, chat in enumerate(self._chats)]

    def _prompt_fields(self, run: Run, choice: Choice) -> JsonObject:
        return {"prompt_logprobs": None, "prompt_token_ids": None}
