"""Constructors of a client's queries and orders. Each function here returns a function that makes the message from the
query's id; it raises RequestError for an invalid argument."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

from ...ipc.errors import RequestError
from ...ipc.messages.base import MemoryTag, OrderAction, PauseMode
from ...ipc.messages.client import Control, Query, Tokenize
from ...ipc.params.sampling_params import SamplingParams
from .prompts import Chat, Prompt, check_chat, check_text, new_submit


def tokenize_query(prompt: str | Chat) -> Callable[..., Query]:
    """Return the constructor of the query for the token ids of a text or a chat."""
    if isinstance(prompt, str):
        return partial(Tokenize, prompt=check_text(prompt))
    return partial(Tokenize, chat=check_chat(prompt))


def words_query(text: str) -> Callable[..., Tokenize]:
    """Return the constructor of the query for the tokens of a text, without special tokens."""
    return partial(Tokenize, prompt=check_text(text), add_special_tokens=False)


def prefetch_query(prompt: Prompt, model: str | None = None) -> Callable[..., Control]:
    submit = new_submit("prefetch", prompt, SamplingParams())
    if submit.chat is not None:
        raise RequestError("prefetch_kv takes a text or token ids: tokenize(messages) makes them of a chat")
    ids, salt = submit.prompt_token_ids, submit.params.cache_salt
    query = partial(Control, action="prefetch_kv", prompt=submit.prompt, prompt_token_ids=ids, cache_salt=salt)
    query = partial(query, media=submit.media)
    return partial(query, adapter=model or "")


def order_query(action: OrderAction, **fields: Any) -> Callable[..., Control]:
    """Return the constructor of an order of `action` with these fields of Control and a new order id. The fields are
    not checked."""
    return partial(Control, action=action, order_id=secrets.token_hex(8), **fields)


def pause_query(mode: PauseMode) -> Callable[..., Control]:
    if mode not in get_args(PauseMode):
        raise RequestError(f"mode must be {', '.join(get_args(PauseMode))}, got {mode!r:.80}")
    return order_query("pause", mode=mode)


def sleep_query(level: int | str, mode: PauseMode) -> Callable[..., Control]:
    if level not in (1, 2):
        raise RequestError(f"level must be 1 or 2, got {level!r:.80}: to keep all memory, use pause()")
    return partial(pause_query(mode), action="sleep", sleep_level=level)


def wake_up_query(tags: Sequence[MemoryTag] | None) -> Callable[..., Control]:
    named = None if tags is None else list(tags)
    for tag in named or ():
        if tag not in get_args(MemoryTag):
            raise RequestError(f"tags must be of {', '.join(get_args(MemoryTag))}, got {tag!r:.80}")
    return order_query("wake_up", tags=named)
