"""PromptReader: where a prompt is tokenized: at once, in a thread, or in an intake process, by its length.

Up to SHORT_CHARACTERS it takes a millisecond. Up to LONG_CHARACTERS a thread does it, without Python's lock but for
a few milliseconds. Beyond, it takes seconds and hundreds of bytes of memory for each of the text, and is given to a
process that can be killed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ipc.codec import num_ids
from ...ipc.errors import RequestError
from ...ipc.messages.client import ChatMessage
from ...ipc.messages.intake import IntakeAnswer, NotRead, PromptRead, ReadPrompt
from ..openai.forms.messages import ChatInput
from .background import WAIT_S, Background, BackgroundJob, Then
from .input_processor import InputProcessor, Prompt

SHORT_CHARACTERS = 4096
LONG_CHARACTERS = 256 << 10
TURN_CHARACTERS = 16  # that a template adds to each turn


class PromptReader:
    """`then` is called once, in the loop, with the outcome, unless the job that is returned is cancelled first."""

    def __init__(self, inputs: InputProcessor, background: Background) -> None:
        self._inputs = inputs
        self._background = background

    def read(
        self,
        prompt: str | None,
        token_ids: bytes | None,
        chat: list[ChatMessage] | None,
        then: Then[Prompt],
        *,
        add_special_tokens: bool = True,
        may_be_long: bool = False,
        owner: str = "",
        wait_s: float = WAIT_S,
    ) -> BackgroundJob | None:
        """The tokens of a prompt; of `may_be_long`, all that may be kept of them. Exactly one of the three is given."""
        num_characters = characters_of(prompt, chat)
        if num_characters > LONG_CHARACTERS and token_ids is None and (prompt is None or chat is None):
            if prompt is not None and not may_be_long:
                try:
                    self._inputs.limits.check_characters(len(prompt))  # which costs nothing
                except RequestError as error:
                    then(error)
                    return None
            question = ReadPrompt(
                prompt=prompt,
                chat=chat,
                add_special_tokens=add_special_tokens,
                may_be_long=may_be_long,
                max_bytes_per_token=self._inputs.limits.max_bytes_per_token,
            )
            return self._background.ask(
                question,
                (),
                lambda answer: Prompt(ids_of(answer), prompt),
                then,
                num_bytes=num_characters,
                owner=owner,
                wait_s=wait_s,
            )
        return self._background.run(
            lambda: self._inputs.tokenize(
                prompt, token_ids, chat, add_special_tokens=add_special_tokens, may_be_long=may_be_long
            ),
            then,
            is_long=num_characters > SHORT_CHARACTERS,
            num_bytes=num_characters,
            owner=owner,
            wait_s=wait_s,
        )

    def detokenize(self, token_ids: bytes, then: Then[str], *, owner: str) -> BackgroundJob | None:
        """The text of tokens."""
        return self._background.run(
            lambda: self._inputs.detokenize(token_ids),
            then,
            is_long=num_ids(token_ids) > SHORT_CHARACTERS,
            num_bytes=len(token_ids),
            owner=owner,
        )

    def read_chat(self, chat: ChatInput, then: Then[Prompt], *, may_be_long: bool, owner: str) -> BackgroundJob | None:
        """The prompt of a small HTTP body's chat, whose turns may hold more than text."""
        return self._background.run(
            lambda: self._inputs.encode_chat(chat.turns, chat.variables, may_be_long=may_be_long),
            then,
            is_long=chat.num_characters > SHORT_CHARACTERS,
            num_bytes=chat.num_characters,
            owner=owner,
        )


def characters_of(prompt: str | None, chat: Sequence[ChatMessage] | None) -> int:
    """About as many as will be tokenized."""
    in_chat = sum(len(message.content) + TURN_CHARACTERS for message in chat or ())
    return len(prompt or "") + in_chat


def ids_of(answer: IntakeAnswer) -> bytes:
    """The token ids that an intake process has found, or its error."""
    if isinstance(answer, PromptRead):
        return answer.token_ids
    assert isinstance(answer, NotRead), "it answers what it is asked"
    raise RequestError(answer.message)
