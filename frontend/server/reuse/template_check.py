"""Whether a chat template renders equal chats to equal text at any time: else no request finds what lies behind the
difference in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator

from ....ipc.errors import RequestError
from ....ipc.messages.client import ChatMessage
from ..text.chat_template import ChatTemplate
from .moved_tokens import num_common

_CHAT = [ChatMessage("system", "Be kind."), ChatMessage("user", "Hello")]
_AT = 1_700_000_000.0  # unix seconds
_LATER = (  # seconds, and how often the text changes if it differs by then
    (0.0, "each time"),
    (61.0, "with the time of day"),
    (32 * 86_400.0, "from day to day"),
)


def unstable_line(template: ChatTemplate) -> str:
    """Return a line about a template that renders equal chats differently; "" if it does not, or renders none."""
    for chat in (_CHAT, _CHAT[1:]):
        try:
            return next(_lines(template, chat), "")
        except RequestError:  # it takes no system message
            continue
    return ""


def _lines(template: ChatTemplate, chat: list[ChatMessage]) -> Iterator[str]:
    first = template.render(chat, now=_AT)
    for seconds, often in _LATER:
        later = template.render(chat, now=_AT + seconds)
        if later != first:
            num_equal = num_common(first.encode("utf-32-le"), later.encode("utf-32-le"))
            yield (
                f"the chat template writes another text {often}, from character {num_equal} of a prompt on: the prefix "
                "cache finds nothing behind that of requests before; give another --chat-template, or set the variable "
                "that it reads with --default-chat-template-kwargs"
            )
