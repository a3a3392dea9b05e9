"""PromptReader: where a prompt is tokenized: at once, in a thread, or in an intake process, by its length.

Up to SHORT_CHARACTERS it takes a millisecond. Up to LONG_CHARACTERS a thread does it, without Python's lock but for
a few milliseconds. Beyond, it takes seconds and hundreds of bytes of memory for each of the text, and is given to a
process that can be killed. So is a chat with a template of its caller's, which may run for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...ipc.codec import num_ids
from ...ipc.errors import RequestError
from ...ipc.messages.client import ChatForm, ChatMessage
from ...ipc.messages.intake import IntakeAnswer, NotRead, PromptRead, ReadPrompt
from ...ipc.sampling_params import CutSide
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
        form: ChatForm | None = None,
        add_special_tokens: bool = True,
        cut_side: CutSide | None = None,
        owner: str = "",
        wait_s: float = WAIT_S,
    ) -> BackgroundJob | None:
        """The tokens of a prompt, or with `cut_side` all of them that may be kept. Exactly one of the three is given;
        `form` is of the chat."""
        num_characters = characters_of(prompt, chat, form)
        is_foreign = chat is not None and form is not None and form.template is not None
        is_whole = token_ids is None and (prompt is None or chat is None)
        if is_whole and (is_foreign or num_characters > LONG_CHARACTERS):
            if prompt is not None and cut_side is None:
                try:
                    self._inputs.limits.check_characters(len(prompt))  # which costs nothing
                except RequestError as error:
                    then(error)
                    return None
            question = ReadPrompt(
                prompt=prompt,
                chat=chat,
                chat_form=form,
                add_special_tokens=add_special_tokens,
                cut_side=cut_side,
                max_bytes_per_token=self._inputs.limits.max_bytes_per_token,
            )
            return self._background.ask(
                question,
                (),
                lambda answer: _prompt_of(answer, prompt),
                then,
                num_bytes=num_characters,
                owner=owner,
                wait_s=wait_s,
            )
        return self._background.run(
            lambda: self._inputs.tokenize(
                prompt, token_ids, chat, form=form, add_special_tokens=add_special_tokens, cut_side=cut_side
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


def characters_of(prompt: str | None, chat: Sequence[ChatMessage] | None, form: ChatForm | None = None) -> int:
    """About as many as will be tokenized."""
    in_chat = sum(len(message.content) + TURN_CHARACTERS for message in chat or ())
    others = [message.more for message in chat or () if message.more]
    if form is not None and form.variables:
        others.append(form.variables)
    return len(prompt or "") + in_chat + sum(len(msgspec.msgpack.encode(each)) for each in others)


def _prompt_of(answer: IntakeAnswer, prompt: str | None) -> Prompt:
    """What an intake process has made of a prompt or a chat, or its error."""
    if isinstance(answer, PromptRead):
        return Prompt(answer.token_ids, answer.text if prompt is None else prompt)
    assert isinstance(answer, NotRead), "it answers what it is asked"
    raise RequestError(answer.message)
