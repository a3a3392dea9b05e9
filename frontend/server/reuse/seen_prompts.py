"""SeenPrompts: the last prompts of each caller, for the comparison of a new prompt with the nearest one before it.

A chat continues another if both begin with the same message of a user, whatever stands in the system prompt; a prompt
without messages, if it begins with the same tokens. Callers with other API keys, addresses or salts are never compared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from ....ipc.codec import encode_ids
from ....ipc.messages.client import ChatField, Submit
from ...forms.chat_fields import chat_fields
from .moved_tokens import num_common

MAX_BYTES = 16 << 20  # of all prompts that are kept
MAX_OF_CONVERSATION = 4
NUM_FIRST = 16  # tokens by which prompts without messages belong together


class SeenPrompt:
    """A prompt with its tokens, to which those of its answer are added, and the fields that it was rendered from."""

    __slots__ = ("conversation", "fields", "num_bytes", "num_prompt_tokens", "token_ids")

    def __init__(self, conversation: Hashable, token_ids: bytes, fields: Sequence[ChatField]) -> None:
        self.conversation, self.token_ids = conversation, token_ids
        self.num_prompt_tokens = len(token_ids) // 4
        self.fields = fields
        self.num_bytes = 2 * len(token_ids) + 300 * len(fields) + 500

    def add_answer(self, token_ids: Sequence[int]) -> None:
        """Add the tokens of the answer, but for the last: it was never computed."""
        self.token_ids = self.prompt_ids + encode_ids(token_ids[:-1])

    @property
    def prompt_ids(self) -> bytes:
        return self.token_ids[: 4 * self.num_prompt_tokens]


class SeenPrompts:
    """Owner of the prompts, of at most MAX_BYTES together: those of the conversations that went on longest ago are
    forgotten."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._by_conversation: OrderedDict[Hashable, list[SeenPrompt]] = OrderedDict()

    def visit(self, caller: str, submit: Submit, token_ids: bytes) -> tuple[SeenPrompt, SeenPrompt | None]:
        """Keep a prompt; return it, and of the earlier ones of its conversation that with which it has most tokens in
        common, the newest of equal ones; None if it is the first."""
        fields = chat_fields(submit.chat, submit.chat_form) if submit.chat else submit.chat_fields
        seen = SeenPrompt((caller, submit.params.cache_salt, _begin_of(fields, token_ids)), token_ids, fields)
        of_conversation = self._by_conversation.pop(seen.conversation, [])
        self._by_conversation[seen.conversation] = of_conversation
        nearest = max(reversed(of_conversation), key=lambda each: num_common(each.token_ids, token_ids), default=None)
        of_conversation.append(seen)
        self._num_bytes += seen.num_bytes
        if len(of_conversation) > MAX_OF_CONVERSATION:
            self._num_bytes -= of_conversation.pop(0).num_bytes
        while self._num_bytes > self._max_bytes:
            oldest = next(iter(self._by_conversation))
            self._num_bytes -= sum(each.num_bytes for each in self._by_conversation.pop(oldest))
        return seen, nearest

    @property
    def num_bytes(self) -> int:
        return self._num_bytes


def _begin_of(fields: Sequence[ChatField], token_ids: bytes) -> bytes:
    """Return the part of a prompt that those of its conversation share."""
    turns = (field.digest for field in fields if field.role not in ("system", "developer", "tools", ""))
    return next(turns, token_ids[: 4 * NUM_FIRST])
