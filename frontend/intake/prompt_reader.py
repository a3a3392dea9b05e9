"""PromptReader: tokenizes prompts at once, in a thread, or in an intake process, by their length.

Up to SHORT_CHARACTERS take a millisecond in the loop. Up to LONG_CHARACTERS a thread tokenizes, and holds the GIL for a
few milliseconds only. Longer texts take seconds and hundreds of bytes of memory per byte: they go to a process that can
be killed. So does a chat with a template from the request, which may never end.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...ipc.codec import num_ids
from ...ipc.errors import RequestError
from ...ipc.messages.client import ChatForm, ChatMessage
from ...ipc.messages.intake import IntakeAnswer, NotRead, PromptRead, ReadPrompt
from ...ipc.sampling_params import CutSide
from .input_processor import InputProcessor, Prompt
from .thread_pool import WAIT_S, PoolJob, Then, ThreadPool

SHORT_CHARACTERS = 4096
LONG_CHARACTERS = 256 << 10
TURN_CHARACTERS = 16  # added to each turn by a template, about


class PromptReader:
    """The loop calls `then` once with the result or error, unless the returned job is cancelled before."""

    def __init__(self, inputs: InputProcessor, thread_pool: ThreadPool) -> None:
        self._inputs = inputs
        self._thread_pool = thread_pool

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
    ) -> PoolJob | None:
        """Tokenize a prompt; with `cut_side` only the tokens that a truncation may keep. Exactly one of `prompt`,
        `token_ids` and `chat` is given; `form` belongs to the chat."""
        num_characters = characters_of(prompt, chat, form)
        is_foreign = chat is not None and form is not None and form.template is not None
        is_whole = token_ids is None and (prompt is None or chat is None)
        if is_whole and (is_foreign or num_characters > LONG_CHARACTERS):
            if prompt is not None and cut_side is None:
                try:
                    self._inputs.limits.check_characters(len(prompt))
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
            return self._thread_pool.ask(
                question,
                (),
                lambda answer: _prompt_of(answer, prompt),
                then,
                num_bytes=num_characters,
                owner=owner,
                wait_s=wait_s,
            )
        return self._thread_pool.run(
            lambda: self._inputs.tokenize(
                prompt, token_ids, chat, form=form, add_special_tokens=add_special_tokens, cut_side=cut_side
            ),
            then,
            is_long=num_characters > SHORT_CHARACTERS,
            num_bytes=num_characters,
            owner=owner,
            wait_s=wait_s,
        )

    def detokenize(self, token_ids: bytes, then: Then[str], *, owner: str) -> PoolJob | None:
        """Decode tokens, in a thread if they are many."""
        return self._thread_pool.run(
            lambda: self._inputs.detokenize(token_ids),
            then,
            is_long=num_ids(token_ids) > SHORT_CHARACTERS,
            num_bytes=len(token_ids),
            owner=owner,
        )


def characters_of(prompt: str | None, chat: Sequence[ChatMessage] | None, form: ChatForm | None = None) -> int:
    """Estimate the number of characters to tokenize."""
    in_chat = sum(len(message.content) + TURN_CHARACTERS for message in chat or ())
    others = [message.more for message in chat or () if message.more]
    if form is not None and form.variables:
        others.append(form.variables)
    return len(prompt or "") + in_chat + sum(len(msgspec.msgpack.encode(each)) for each in others)


def _prompt_of(answer: IntakeAnswer, prompt: str | None) -> Prompt:
    """Convert an intake process's answer to a prompt; raises its error."""
    if isinstance(answer, PromptRead):
        return Prompt(answer.token_ids, answer.text if prompt is None else prompt)
    assert isinstance(answer, NotRead), "a ReadPrompt is answered by PromptRead or NotRead"
    raise RequestError(answer.message)
