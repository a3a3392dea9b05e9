"""BaseClient: the part that Client and AsyncClient share: transport, lifetime, construction of messages.

Needs pyzmq and msgspec, not torch. Knows neither the wire (`transport.py`) nor the forms of prompts (`prompts.py`).
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Self, get_args

from ...ipc.errors import RequestError
from ...ipc.messages.base import MemoryTag
from ...ipc.messages.client import ChatForm, Control, ControlAction, PauseMode, Query, Submit, Tokenize
from ...ipc.pooling_params import PoolingParams
from ...ipc.process.log import LogLevel
from ...ipc.sampling_params import SamplingParams
from .prompts import Chat, Prompt, check_chat, check_pooling, check_text, new_submit
from .transport import Transport
from .zmq_transport import ZmqTransport


class BaseClient:
    """Client of a running engine. `close`, also at the end of a `with` block, aborts its open requests."""

    _waits_for_engine: ClassVar[bool]
    _defaults: dict[str, Any] | None = None  # the engine's sampling defaults; None: not fetched yet

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_s: float = 10.0,
        reconnect_timeout_s: float = 30.0,
        key_file: str | os.PathLike[str] | None = None,
    ) -> None:
        """Connect to the engine at `address`, as engine-launch prints it; `key_file` is the engine's --key-file.

        If no engine answers within `connect_timeout_s`, EngineDead is raised: by this constructor in a Client, by the
        first request or by `async with` in an AsyncClient. If the frontend process dies later, open requests resume
        with its replacement, or fail with EngineDead after `reconnect_timeout_s`.
        """
        transport = ZmqTransport(
            address,
            connect_timeout_s=connect_timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
            key_file=key_file,
        )
        self._attach(transport, transport.close)
        if self._waits_for_engine:
            try:
                transport.wait_connected()
            except BaseException:
                self._finalizer()
                raise

    def _attach(self, transport: Transport, close: Callable[[], None]) -> None:
        """Use `transport`. `close` runs once: in `close()`, at garbage collection or at exit, the earliest of them."""
        self._transport = transport
        self._finalizer = weakref.finalize(self, close)
        self._request_numbers = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._finalizer()

    def _new_submit(
        self,
        prompt: Prompt | Chat,
        params: SamplingParams,
        request_id: str | None = None,
        pooling: PoolingParams | None = None,
        form: ChatForm | None = None,
    ) -> Submit:
        if request_id is None:
            request_id = f"request-{next(self._request_numbers)}"
        return new_submit(request_id, prompt, params, pooling, form)

    def _embed_submits(
        self,
        prompts: list[Prompt],
        pooling_params: PoolingParams | None,
        request_id: str | None,
        truncate_prompt_tokens: int | None,
        priority: int,
        timeout_s: float | None,
    ) -> list[Submit]:
        params = SamplingParams(
            truncate_prompt_tokens=truncate_prompt_tokens, priority=priority, timeout_s=timeout_s, max_tokens=1
        )
        pooling = check_pooling(pooling_params)
        return [self._new_submit(prompt, params, request_id, pooling) for prompt in prompts]


def tokenize_query(prompt: str | Chat) -> Callable[..., Query]:
    """Make the query for the token ids of a text or a chat.

    Like every query function here it returns a constructor, which Transport.query calls with the query's id.
    """
    if isinstance(prompt, str):
        return partial(Tokenize, prompt=check_text(prompt))
    return partial(Tokenize, chat=check_chat(prompt))


def control_query(action: ControlAction) -> Callable[..., Control]:
    return partial(Control, action=action)


def pause_query(mode: PauseMode) -> Callable[..., Control]:
    if mode not in get_args(PauseMode):
        raise RequestError(f"mode must be {', '.join(get_args(PauseMode))}, got {mode!r:.80}")
    return partial(Control, action="pause", mode=mode)


def sleep_query(level: int | str, mode: PauseMode) -> Callable[..., Control]:
    if level not in (1, 2):
        raise RequestError(f"level must be 1 or 2, got {level!r:.80}: to keep all memory, use pause()")
    return partial(pause_query(mode), action="sleep", sleep_level=level)


def wake_up_query(tags: Sequence[MemoryTag] | None) -> Callable[..., Control]:
    named = None if tags is None else list(tags)
    for tag in named or ():
        if tag not in get_args(MemoryTag):
            raise RequestError(f"tags must be of {', '.join(get_args(MemoryTag))}, got {tag!r:.80}")
    return partial(Control, action="wake_up", tags=named)


def log_level_query(level: LogLevel) -> Callable[..., Query]:
    if level not in get_args(LogLevel):
        raise RequestError(f"level must be {', '.join(get_args(LogLevel))}, got {level!r:.80}")
    return partial(Control, action="log_level", level=level)


def reload_query(model: str | os.PathLike[str]) -> Callable[..., Query]:
    if not isinstance(model, (str, os.PathLike)):
        raise RequestError(f"model is {model!r:.80}: it must be a folder or a hub id")
    folder = os.path.abspath(model) if os.path.isdir(model) else os.fspath(model)  # the engine runs in another folder
    return partial(Control, action="reload", model=folder)
