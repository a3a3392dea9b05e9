"""AsyncClient: the Client for an event loop. `async for output in client.generate(prompt, params)`.

Outputs are cumulative; cancelling the task, or leaving the loop early, aborts the request. One client may serve any
number of tasks, and event loops one after the other.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TypeVar

from ..ipc.codec import decode_ids
from ..ipc.messages import (
    Control,
    Detokenize,
    Done,
    GetHealth,
    GetInfo,
    Health,
    Info,
    PauseMode,
    Submit,
    Text,
    TokenIds,
    Tokenize,
)
from ..ipc.pooling_params import PoolingParams
from ..ipc.sampling_params import SamplingParams
from .async_stream import AsyncStream, LoopWaker
from .channel import Channel, Query, Reply
from .client import ReplyType, check_reply
from .connection import Connection
from .embedding import EmbeddingRequestOutput, to_embedding
from .outputs import RequestOutput
from .prompts import (
    Chat,
    Prompt,
    chat_submit,
    check_chat,
    check_params,
    check_pooling,
    check_text,
    check_token_ids,
    new_submit,
)

AsyncClientType = TypeVar("AsyncClientType", bound="AsyncClient")


class AsyncClient:
    """A program's side of an engine. Close it, or use it as a context manager; what is open then is aborted."""

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_s: float = 10.0,
        reconnect_timeout_s: float = 30.0,
        key_file: str | os.PathLike[str] | None = None,
    ) -> None:
        """Attach to the engine at `address`, as engine-launch prints it.

        Does not wait: the first request, or entering the context, raises EngineDead if nobody answers within
        `connect_timeout_s`.
        """
        connection = Connection(
            address,
            connect_timeout_s=connect_timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
            key_file=key_file,
        )
        self._attach(connection, connection.close)

    def _attach(self, channel: Channel, close: Callable[[], None]) -> None:
        """Serve over `channel`; `close` runs once: when asked, when this object is collected, or at exit."""
        self._channel = channel
        self._finalizer = weakref.finalize(self, close)
        self._request_numbers = itertools.count()
        self._waker: LoopWaker | None = None  # of the loop that was used last

    # ── answers ──

    def generate(
        self,
        prompt: Prompt | Chat,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer as it grows: each output holds all that came before; the last one is `finished`.

        The request starts with the first `anext`. A consumer that is slow gets fewer, longer steps.
        """
        request_id = self._new_id() if request_id is None else request_id
        return self._run(new_submit(request_id, prompt, check_params(sampling_params)))

    def chat(
        self, messages: Chat, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The next turn of a conversation as it grows; a message is {"role": …, "content": …}."""
        request_id = self._new_id() if request_id is None else request_id
        return self._run(chat_submit(request_id, messages, check_params(sampling_params)))

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> EmbeddingRequestOutput:
        """The vector of a prompt; as Client.embed."""
        request_id = self._new_id() if request_id is None else request_id
        params = SamplingParams(
            truncate_prompt_tokens=truncate_prompt_tokens, priority=priority, timeout_s=timeout_s, max_tokens=1
        )
        submit = new_submit(request_id, prompt, params, check_pooling(pooling_params))
        async with aclosing(self._run(submit)) as outputs:
            return await anext(to_embedding(output) async for output in outputs if output.finished)

    async def abort(self, request_id: str) -> None:
        """End a request: whoever waits for it gets what there is, with finish_reason abort."""
        self._channel.abort(request_id)

    # ── questions ──

    async def tokenize(self, prompt: str | Chat) -> list[int]:
        """The token ids that the engine would compute for a text or a chat."""
        if isinstance(prompt, str):
            text = check_text(prompt)
            reply = await self._ask(lambda query_id: Tokenize(query_id=query_id, prompt=text), TokenIds)
        else:
            chat = check_chat(prompt)
            reply = await self._ask(lambda query_id: Tokenize(query_id=query_id, chat=chat), TokenIds)
        return decode_ids(reply.token_ids).tolist()

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        frame = check_token_ids(token_ids)
        return (await self._ask(lambda query_id: Detokenize(query_id=query_id, token_ids=frame), Text)).text

    async def health(self) -> Health:
        """Whether requests are served and steps end."""
        return await self._ask(lambda query_id: GetHealth(query_id=query_id), Health)

    async def info(self) -> Info:
        """What the engine serves: model, sizes, version."""
        return await self._ask(lambda query_id: GetInfo(query_id=query_id), Info)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """As Client.pause."""
        await self._ask(lambda query_id: Control(query_id=query_id, action="pause", mode=mode), Done)

    async def resume(self) -> None:
        """As Client.resume."""
        await self._ask(lambda query_id: Control(query_id=query_id, action="resume"), Done)

    async def reload(self, model: str | os.PathLike[str]) -> None:
        """As Client.reload."""
        folder = os.fspath(model)
        await self._ask(lambda query_id: Control(query_id=query_id, action="reload", model=folder), Done)

    # ── its life ──

    async def close(self) -> None:
        """Let go of the engine; a second call does nothing."""
        await asyncio.to_thread(self._finalizer)

    async def __aenter__(self: AsyncClientType) -> AsyncClientType:
        try:
            await self.info()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __enter__(self: AsyncClientType) -> AsyncClientType:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._finalizer()

    # ── how ──

    def _new_id(self) -> str:
        return f"request-{next(self._request_numbers)}"

    async def _run(self, submit: Submit) -> AsyncGenerator[RequestOutput, None]:
        loop = asyncio.get_running_loop()
        if self._waker is None or self._waker.loop is not loop:
            self._waker = LoopWaker(loop)
        stream = AsyncStream(submit, self._waker)
        self._channel.submit(submit, stream.put)
        try:
            while not stream.is_finished:
                output = await stream.next()
                if output is not None:
                    yield output
        finally:
            if not stream.is_finished:
                self._channel.cancel(submit.request_id)

    async def _ask(self, make_query: Callable[[int], Query], reply_type: type[ReplyType]) -> ReplyType:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()

        def settle(reply: Reply) -> None:
            if not future.done():  # the asker may have been cancelled
                future.set_result(reply)

        self._channel.query(make_query, lambda reply: _call_soon(loop, settle, reply))
        return check_reply(await future, reply_type)


def _call_soon(loop: asyncio.AbstractEventLoop, settle: Callable[[Reply], None], reply: Reply) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(settle, reply)
