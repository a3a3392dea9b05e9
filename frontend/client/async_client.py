"""AsyncClient: the Client for an event loop. `async for output in client.generate(prompt, params)`.

Outputs are cumulative; cancelling the task, or leaving the loop early, aborts the request. One client may serve any
number of tasks, and event loops one after the other.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from typing import Self, Unpack

import msgspec

from ...ipc.beam_search_params import BeamSearchParams
from ...ipc.codec import decode_ids
from ...ipc.messages.base import MemoryTag
from ...ipc.messages.client import (
    Control,
    Detokenize,
    Done,
    GetHealth,
    GetInfo,
    GetMetrics,
    Health,
    Info,
    Metrics,
    PauseMode,
    Query,
    Submit,
    Text,
    TokenIds,
)
from ...ipc.messages.metrics import Metric
from ...ipc.pooling_params import PoolingParams
from ...ipc.process.log import LogLevel
from ...ipc.sampling_params import SamplingParams
from .async_stream import AsyncStream, LoopWaker
from .base_client import (
    BaseClient,
    log_level_query,
    new_params,
    pause_query,
    reload_query,
    sleep_query,
    tokenize_query,
    wake_up_query,
)
from .call_options import CallOptions, ChatOptions, UnservedOptions, chat_form, check_options, with_priority
from .offline.beam_search import BeamSearch, BeamSearchOutput
from .offline.tokenizer import TransformersTokenizer, load_tokenizer
from .outputs import EmbeddingRequestOutput, RequestOutput, to_embedding
from .prompts import Chat, Prompt, check_chat, check_params, check_token_ids
from .protocol import QueryResult, ReplyType, check_reply


class AsyncClient(BaseClient):
    """A program's side of an engine. Close it, or use it as a context manager; what is open then is aborted."""

    _waits_for_engine = False
    _waker: LoopWaker | None = None  # of the loop that was used last

    # ── answers ──

    def generate(
        self,
        prompt: Prompt | Chat,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[CallOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer as it grows: each output holds all that came before; the last one is `finished`.

        The request starts with the first `anext`. A consumer that is slow gets fewer, longer steps.
        """
        check_options("generate", options, CallOptions)
        (params,) = with_priority([check_params(sampling_params)], options)
        return self._run(self._submit_of(prompt, params, request_id), takes_defaults=sampling_params is None)

    def chat(
        self,
        messages: Chat,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """The next turn of a conversation as it grows; a message is {"role": …, "content": …}."""
        check_options("chat", options, ChatOptions)
        (params,) = with_priority([check_params(sampling_params)], options)
        submit = self._submit_of(check_chat(messages), params, request_id, form=chat_form(options))
        return self._run(submit, takes_defaults=sampling_params is None)

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        **options: Unpack[UnservedOptions],
    ) -> EmbeddingRequestOutput:
        """The vector of a prompt; as Client.embed."""
        check_options("embed", options, UnservedOptions)
        (submit,) = self._embed_submits(
            [prompt], pooling_params, request_id, truncate_prompt_tokens, priority, timeout_s
        )
        return to_embedding(await self._run_to_end(submit))

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, **options: Unpack[UnservedOptions]
    ) -> BeamSearchOutput:
        """As Client.beam_search, of one prompt."""
        check_options("beam_search", options, UnservedOptions)
        submit, info = self._submit_of(prompt, SamplingParams()), await self.info()
        token_ids = decode_ids(submit.prompt_token_ids or b"").tolist() or await self.tokenize(submit.prompt or "")
        search = BeamSearch([token_ids], params, info)
        while requests := search.requests():
            submits = [self._submit_of(each, search.sampling_params) for each in requests]
            search.take(await asyncio.gather(*map(self._run_to_end, submits)))
        for beam, shown in search.finish():
            beam.text = await self.detokenize(shown) if info.tokenizer_folder else None
        return search.outputs[0]

    async def abort(self, request_id: str) -> None:
        """End a request: whoever waits for it gets what there is, with finish_reason abort."""
        self._transport.abort(request_id)

    # ── questions ──

    async def get_tokenizer(self) -> TransformersTokenizer:
        """As Client.get_tokenizer."""
        return await asyncio.to_thread(load_tokenizer, await self.info())

    async def tokenize(self, prompt: str | Chat) -> list[int]:
        """The token ids that the engine would compute for a text or a chat."""
        return decode_ids((await self._ask(tokenize_query(prompt), TokenIds)).token_ids).tolist()

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return (await self._ask(partial(Detokenize, token_ids=check_token_ids(token_ids)), Text)).text

    async def health(self) -> Health:
        """Whether requests are served and steps end."""
        return await self._ask(GetHealth, Health)

    async def info(self) -> Info:
        """What the engine serves: model, sizes, version."""
        return await self._ask(GetInfo, Info)

    async def get_metrics(self) -> list[Metric]:
        """As Client.get_metrics."""
        return (await self._ask(GetMetrics, Metrics)).metrics

    async def get_default_sampling_params(self) -> SamplingParams:
        """As Client.get_default_sampling_params."""
        return new_params(await self._default_params())

    async def pause(self, mode: PauseMode = "keep") -> None:
        """As Client.pause."""
        await self._ask(pause_query(mode), Done)

    async def resume(self) -> None:
        """As Client.resume."""
        await self._ask(partial(Control, action="resume"), Done)

    async def reload(self, model: str | os.PathLike[str]) -> None:
        """As Client.reload."""
        await self._ask(reload_query(model), Done)

    async def sleep(self, level: int = 1, mode: PauseMode = "keep") -> None:
        """As Client.sleep."""
        await self._ask(sleep_query(level, mode), Done)

    async def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """As Client.wake_up."""
        await self._ask(wake_up_query(tags), Done)

    async def is_sleeping(self) -> bool:
        return (await self.health()).is_asleep

    async def reset_prefix_cache(self) -> bool:
        """As Client.reset_prefix_cache."""
        await self._ask(partial(Control, action="reset_prefix_cache"), Done)
        return True

    async def start_profile(self) -> None:
        """As Client.start_profile."""
        await self._ask(partial(Control, action="start_profile"), Done)

    async def stop_profile(self) -> None:
        """As Client.stop_profile."""
        await self._ask(partial(Control, action="stop_profile"), Done)

    async def set_log_level(self, level: LogLevel) -> None:
        """As Client.set_log_level."""
        await self._ask(log_level_query(level), Done)

    # ── its life ──

    async def close(self) -> None:
        """Let go of the engine; a second call does nothing."""
        await asyncio.to_thread(self._finalizer)

    async def __aenter__(self) -> Self:
        try:
            await self.info()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # ── how ──

    async def _default_params(self) -> dict[str, int | float]:
        if self._defaults is None:
            self._defaults = (await self.info()).default_sampling_params
        return self._defaults

    async def _run(self, submit: Submit, *, takes_defaults: bool = False) -> AsyncGenerator[RequestOutput, None]:
        if takes_defaults and (defaults := await self._default_params()):
            submit = msgspec.structs.replace(submit, params=submit.params.replace(**defaults))
        loop = asyncio.get_running_loop()
        if self._waker is None or self._waker.loop is not loop:
            self._waker = LoopWaker(loop)
        stream = AsyncStream(submit, self._waker)
        self._transport.submit(submit, stream.put)
        try:
            while not stream.is_finished:
                output = await stream.next()
                if output is not None:
                    yield output
        finally:
            if not stream.is_finished:
                self._transport.cancel(submit.request_id)

    async def _run_to_end(self, submit: Submit) -> RequestOutput:
        async with aclosing(self._run(submit)) as outputs:
            return await anext(output async for output in outputs if output.finished)

    async def _ask(self, make_query: Callable[..., Query], reply_type: type[ReplyType]) -> ReplyType:
        future: Future[QueryResult] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled, even if the asker is
        self._transport.query(make_query, future.set_result)
        return check_reply(await asyncio.wrap_future(future), reply_type)
