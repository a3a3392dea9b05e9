"""PromptReader: tokenizes prompts at once, in a thread, or in an intake process, depending on their length.

Up to SHORT_CHARACTERS take a millisecond in the event loop. Up to LONG_CHARACTERS are tokenized in a thread, which
holds the GIL for a few milliseconds only. Longer texts take seconds and hundreds of bytes of memory per byte: they go
to a process that can be killed. So does a chat with a template from the request, since rendering it may never end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from ....ipc.codec import JsonObject, num_ids
from ....ipc.errors import RequestError
from ....ipc.messages.intake import IntakeAnswer, NotRead, PromptRead, ReadPrompt
from ..helpers.intake import IntakeHelper, IntakePool, ask_intake
from ..helpers.pool import WAIT_S
from ..helpers.task import reply_of
from .input_processor import InputProcessor
from .prompt import Prompt

T = TypeVar("T")

SHORT_CHARACTERS = 4096
LONG_CHARACTERS = 256 << 10
TURN_CHARACTERS = 16  # that a template adds to each turn, roughly


class PromptReader:
    """Reader of prompts for the frontend's event loop. Its coroutines wait only for threads, which drop the job or are
    interrupted when the coroutine is closed."""

    def __init__(self, inputs: InputProcessor, pool: IntakePool) -> None:
        self.inputs = inputs
        self._pool = pool

    async def read(self, question: ReadPrompt, *, owner: str = "", wait_s: float = WAIT_S) -> Prompt:
        """Tokenize a prompt. If it has a `cut_side`, tokens that a truncation at that side drops may be missing."""
        prompt, chat, form = question.prompt, question.chat, question.chat_form
        num_characters = characters_of(question)
        is_foreign = chat is not None and form is not None and form.template is not None
        is_whole = question.token_ids is None and (prompt is None or chat is None)
        if is_whole and (is_foreign or num_characters > LONG_CHARACTERS):
            if prompt is not None and question.cut_side is None:
                self.inputs.limits.check_characters(len(prompt))
            whole = msgspec.structs.replace(question, max_bytes_per_token=self.inputs.limits.max_bytes_per_token)
            return await self._run(
                lambda helper: _prompt_of(ask_intake(helper, whole), prompt), num_characters, owner, wait_s
            )
        if num_characters > SHORT_CHARACTERS:
            return await self._run(lambda _: self.inputs.tokenize(question), num_characters, owner, wait_s)
        return self.inputs.tokenize(question)

    async def detokenize(self, token_ids: bytes, *, owner: str) -> str:
        """Decode tokens; more than SHORT_CHARACTERS of them in a thread."""
        if num_ids(token_ids) > SHORT_CHARACTERS:
            return await self._run(lambda _: self.inputs.detokenize(token_ids), len(token_ids), owner, WAIT_S)
        return self.inputs.detokenize(token_ids)

    async def _run(self, work: Callable[[IntakeHelper], T], num_bytes: int, owner: str, wait_s: float) -> T:
        """Do work in a thread."""
        return await reply_of(
            lambda then: self._pool.run(work, then, num_bytes=num_bytes, owner=owner, wait_s=wait_s),
            self._pool.cancel,
        )


def characters_of(question: ReadPrompt) -> int:
    """Return an estimate of the number of characters to tokenize, including a chat's variables."""
    chat, form = question.chat or (), question.chat_form
    others = [message.more for message in chat if message.more]
    if form is not None and form.variables:
        others.append(form.variables)
    in_chat = sum(len(message.text) + TURN_CHARACTERS for message in chat)
    return len(question.prompt or "") + len(question.text_pair or "") + in_chat + sum(map(_num_bytes, others))


def _num_bytes(variables: JsonObject) -> int:
    """Return the encoded size of a chat's variables."""
    try:
        return len(msgspec.msgpack.encode(variables))
    except OverflowError:  # an integer above 64 bits, which JSON can hold; frames hold others that JSON cannot
        return len(msgspec.json.encode(variables))


def _prompt_of(answer: IntakeAnswer, prompt: str | None) -> Prompt:
    """Return the prompt in an intake process's answer. RequestError if the process reports an error."""
    if isinstance(answer, PromptRead):
        text = answer.text if prompt is None else prompt
        return Prompt(answer.token_ids, text, first_type_tokens=answer.first_type_tokens)
    assert isinstance(answer, NotRead), "a ReadPrompt is answered by PromptRead or NotRead"
    raise RequestError(answer.message)
