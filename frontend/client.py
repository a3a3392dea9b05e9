"""Client: attaches to a running engine from any program, and from any number of threads at once.

Imports `ipc` alone: pyzmq and msgspec, not torch. What a request is on the wire is the Channel's business, what a
prompt may look like is `prompts.py`'s.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import TypeVar

from ..ipc.codec import decode_ids
from ..ipc.errors import ProtocolError, RequestError, TokenloomError
from ..ipc.messages import (
    Control,
    Delta,
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
from .batch import Batch
from .channel import Channel, Query, Reply, Update
from .connection import Connection
from .embedding import EmbeddingRequestOutput, to_embedding
from .outputs import OutputBuilder, RequestOutput
from .prompts import (
    Chat,
    Prompt,
    chat_submit,
    check_chat,
    check_params,
    check_pooling,
    check_text,
    check_token_ids,
    list_chats,
    list_params,
    list_prompts,
    new_submit,
)
from .request_future import RequestFuture

ReplyType = TypeVar("ReplyType", TokenIds, Text, Health, Info, Done)
ClientType = TypeVar("ClientType", bound="Client")


class Client:
    """A program's side of an engine. Close it, or use it as a context manager; what is open then is aborted."""

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_s: float = 10.0,
        reconnect_timeout_s: float = 30.0,
        key_file: str | os.PathLike[str] | None = None,
    ) -> None:
        """Attach to the engine at `address`, as engine-launch prints it; `key_file` is what it got as --key-file.

        Raises EngineDead if nobody answers within `connect_timeout_s`. When the engine's frontend is lost later, open
        requests go on as soon as it is back, and fail with EngineDead after `reconnect_timeout_s`.
        """
        connection = Connection(
            address,
            connect_timeout_s=connect_timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
            key_file=key_file,
        )
        self._attach(connection, connection.close)
        try:
            connection.wait_connected()
        except BaseException:
            self.close()
            raise

    def _attach(self, channel: Channel, close: Callable[[], None]) -> None:
        """Serve over `channel`; `close` runs once: when asked, when this object is collected, or at exit."""
        self._channel = channel
        self._finalizer = weakref.finalize(self, close)
        self._request_numbers = itertools.count()

    # ── answers ──

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers to all prompts, in their order.

        A prompt is text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; SamplingParams are one for all or
        one each. A prompt that cannot be served raises its error, after the others are aborted.
        """
        listed = list_prompts(prompts)
        params = list_params(sampling_params, len(listed))
        return self._run([self._prompt_submit(*each) for each in zip(listed, params, strict=True)], use_tqdm)

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The next turn of one conversation, or of each of many; a message is {"role": …, "content": …}."""
        chats = list_chats(messages)
        params = list_params(sampling_params, len(chats))
        submits = [chat_submit(self._new_id(), chat, each) for chat, each in zip(chats, params, strict=True)]
        return self._run(submits, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """The vectors of all prompts, in their order; see PoolingParams. What is given by name is as in SamplingParams.

        A prompt that cannot be served, or was not embedded in time, raises its error.
        """
        params = SamplingParams(
            truncate_prompt_tokens=truncate_prompt_tokens, priority=priority, timeout_s=timeout_s, max_tokens=1
        )
        pooling = check_pooling(pooling_params)
        submits = [new_submit(self._new_id(), prompt, params, pooling) for prompt in list_prompts(prompts)]
        return [to_embedding(output) for output in self._run(submits, use_tqdm)]

    def submit(
        self, prompt: Prompt | Chat, sampling_params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Future[RequestOutput]:
        """Ask without waiting. `cancel()` on the future aborts; `request_id` is there for `abort`."""
        submit = self._prompt_submit(prompt, check_params(sampling_params), request_id)
        future = RequestFuture(self._channel, submit)
        self._channel.submit(submit, future.take)
        return future

    def stream(
        self, prompt: Prompt | Chat, sampling_params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Iterator[str]:
        """The answer's text, piece by piece as it is made. Closing the iterator aborts the request."""
        params = check_params(sampling_params)
        if params.n > 1:
            raise RequestError(
                f"a stream of text shows one answer, n is {params.n}: use submit, or AsyncClient.generate"
            )
        return self._stream(self._prompt_submit(prompt, params, request_id))

    def abort(self, request_id: str) -> None:
        """End a request: whoever waits for it gets what there is, with finish_reason abort."""
        self._channel.abort(request_id)

    # ── questions ──

    def tokenize(self, prompt: str | Chat) -> list[int]:
        """The token ids that the engine would compute for a text or a chat."""
        if isinstance(prompt, str):
            text = check_text(prompt)
            reply = self._ask(lambda query_id: Tokenize(query_id=query_id, prompt=text), TokenIds)
        else:
            chat = check_chat(prompt)
            reply = self._ask(lambda query_id: Tokenize(query_id=query_id, chat=chat), TokenIds)
        return decode_ids(reply.token_ids).tolist()

    def detokenize(self, token_ids: Sequence[int]) -> str:
        frame = check_token_ids(token_ids)
        return self._ask(lambda query_id: Detokenize(query_id=query_id, token_ids=frame), Text).text

    def health(self) -> Health:
        """Whether requests are served and steps end."""
        return self._ask(lambda query_id: GetHealth(query_id=query_id), Health)

    def info(self) -> Info:
        """What the engine serves: model, sizes, version."""
        return self._ask(lambda query_id: GetInfo(query_id=query_id), Info)

    # ── control ──

    def pause(self, mode: PauseMode = "keep") -> None:
        """Begin nothing new until `resume`; returns when it is so. keep: running requests stop where they are; wait:
        they finish first; abort: all end with finish_reason abort."""
        self._ask(lambda query_id: Control(query_id=query_id, action="pause", mode=mode), Done)

    def resume(self) -> None:
        """Go on after a pause; without one, nothing happens."""
        self._ask(lambda query_id: Control(query_id=query_id, action="resume"), Done)

    def reload(self, model: str | os.PathLike[str]) -> None:
        """Take the weights of another checkpoint of the same architecture; open requests go on with them."""
        folder = os.fspath(model)
        self._ask(lambda query_id: Control(query_id=query_id, action="reload", model=folder), Done)

    # ── its life ──

    def close(self) -> None:
        """Let go of the engine; a second call does nothing."""
        self._finalizer()

    def __enter__(self: ClientType) -> ClientType:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ── how ──

    def _new_id(self) -> str:
        return f"request-{next(self._request_numbers)}"

    def _prompt_submit(self, prompt: Prompt | Chat, params: SamplingParams, request_id: str | None = None) -> Submit:
        return new_submit(self._new_id() if request_id is None else request_id, prompt, params)

    def _run(self, submits: list[Submit], use_tqdm: bool) -> list[RequestOutput]:
        return Batch(self._channel, submits, show_progress=use_tqdm).run()

    def _stream(self, submit: Submit) -> Iterator[str]:
        updates: SimpleQueue[Update] = SimpleQueue()
        builder = OutputBuilder(submit)
        self._channel.submit(submit, updates.put)
        try:
            while not builder.is_finished:
                update = self._channel.wait(updates)
                builder.add(update)
                if isinstance(update, TokenloomError):
                    raise update
                if isinstance(update, Delta) and update.text:
                    yield update.text
        finally:
            if not builder.is_finished:
                self._channel.cancel(submit.request_id)

    def _ask(self, make_query: Callable[[int], Query], reply_type: type[ReplyType]) -> ReplyType:
        replies: SimpleQueue[Reply] = SimpleQueue()
        self._channel.query(make_query, replies.put)
        return check_reply(self._channel.wait(replies), reply_type)


def check_reply(reply: Reply, reply_type: type[ReplyType]) -> ReplyType:
    """The reply as the type that was asked for; raises it if it is an error."""
    if isinstance(reply, TokenloomError):
        raise reply
    if not isinstance(reply, reply_type):
        raise ProtocolError(f"the engine answered a query with {type(reply).__name__}, not {reply_type.__name__}")
    return reply
