"""AsyncClient: the Client for asyncio. `async for output in client.generate(prompt, params)`.

Cancelling the task or closing the generator aborts the request. Any number of tasks may share one client. Several event
loops may use it, but only one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Self, Unpack

import msgspec

from ...ipc.codec import decode_ids
from ...ipc.messages import client as wire
from ...ipc.messages.adapter import AdapterInfo
from ...ipc.messages.metrics import Metric
from ...ipc.params.beam_search_params import BeamSearchParams
from ...ipc.params.lora_request import LoRARequest
from ...ipc.params.pooling_params import PoolingParams, PoolingTask
from ...ipc.params.sampling_params import SamplingParams
from ..forms import queries
from ..forms.call_options import (
    AdapterOptions,
    CallOptions,
    ChatOptions,
    PoolOptions,
    TranscribeOptions,
    adapters_of,
    chat_form,
    check_options,
    with_priority,
)
from ..forms.prompts import Chat, Prompt, check_params, check_token_ids, list_pairs, read_chat
from .async_stream import AsyncStream, LoopWaker
from .base_client import BaseClient, new_tools
from .offline.beam_search import BeamSearch, BeamSearchOutput
from .offline.tokenizer import TransformersTokenizer, load_tokenizer
from .outputs import RequestOutput, TranscriptionOutput
from .pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RerankResult,
    ScoringRequestOutput,
    ranked,
    to_classification,
    to_embedding,
    to_pooling,
    to_scores,
)
from .protocol import QueryResult, ReplyType, check_reply

if TYPE_CHECKING:
    from .chat_tools import ChatTools

MAX_OPEN = 256  # requests of one call of `score` at a time
MAX_OPEN_PIECES = 16  # pieces of one clip that are transcribed at a time


class AsyncClient(BaseClient[Coroutine[Any, Any, None]]):
    """Client of a running engine for asyncio. `close`, which `async with` calls at its end, aborts its open
    requests."""

    _waits_for_engine = False
    _waker: LoopWaker | None = None  # waker of the event loop used last

    # ── requests ──

    def generate(
        self,
        prompt: Prompt | Chat,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[CallOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the growing output of a request; with output_kind "cumulative" each output contains the ones before.

        The first `anext` submits the request. The last output is `finished`. Outputs that a slow consumer has not
        fetched are merged.
        """
        check_options("generate", options, CallOptions)
        (params,) = with_priority([check_params(sampling_params)], options)
        (adapter,) = adapters_of(options, 1)
        submit = self._new_submit(prompt, params, request_id, adapter=adapter)
        return self._run(submit, takes_defaults=sampling_params is None)

    def chat(
        self,
        messages: Chat,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the growing output of the next turn of a conversation, as `generate` does. A message is {"role": …,
        "content": …}. With `tools` a completion that has ended has `message` and `tool_calls`, as in Client.chat."""
        check_options("chat", options, ChatOptions)
        (params,) = with_priority([check_params(sampling_params)], options)
        form, (adapter,) = chat_form(options), adapters_of(options, 1)
        submit = self._new_submit(read_chat(messages), params, request_id, form=form, adapter=adapter)
        return self._run(submit, takes_defaults=sampling_params is None, tools=new_tools(options))

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[PoolOptions],
    ) -> EmbeddingRequestOutput:
        """Return the embedding of one prompt. Options and errors are those of Client.embed."""
        check_options("embed", options, PoolOptions)
        (submit,) = self._pool_submits([prompt], pooling_params, "embed", options, request_id)
        return to_embedding(await self._run_to_end(submit))

    async def classify(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[PoolOptions],
    ) -> ClassificationRequestOutput:
        """Return the probabilities of the classes of one prompt, as Client.classify does."""
        check_options("classify", options, PoolOptions)
        (submit,) = self._pool_submits([prompt], pooling_params, "classify", options, request_id)
        return to_classification(await self._run_to_end(submit))

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        **options: Unpack[PoolOptions],
    ) -> PoolingRequestOutput:
        """Return the result of a task for one prompt, as Client.encode does."""
        check_options("encode", options, PoolOptions)
        (submit,) = self._pool_submits([prompt], pooling_params, pooling_task, options, request_id)
        return to_pooling(await self._run_to_end(submit))

    async def reward(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[PoolOptions],
    ) -> PoolingRequestOutput:
        """Return the rewards of one prompt, as Client.reward does."""
        check_options("reward", options, PoolOptions)
        (submit,) = self._pool_submits([prompt], pooling_params, "token_classify", options, request_id)
        return to_pooling(await self._run_to_end(submit))

    async def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        **options: Unpack[PoolOptions],
    ) -> list[ScoringRequestOutput]:
        """Return a score for each pair of texts, as Client.score does."""
        check_options("score", options, PoolOptions)
        pairs = list_pairs(data_1, data_2)
        info = await self.info()
        outputs = await self._run_together(self._pair_submits(pairs, pooling_params, info, options))
        return to_scores(outputs, pairs, has_pairs="score" in info.pooling_tasks)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        pooling_params: PoolingParams | None = None,
        **options: Unpack[PoolOptions],
    ) -> list[RerankResult]:
        """Return the documents by falling scores for the query, as Client.rerank does."""
        check_options("rerank", options, PoolOptions)
        return ranked(documents, await self.score(query, documents, pooling_params, **options), top_n)

    async def transcribe(self, audio: object, **options: Unpack[TranscribeOptions]) -> TranscriptionOutput:
        """Return the transcript of one audio clip of any length. The forms of a clip and the options are those of
        Client.transcribe."""
        from .speech.transcriber import Transcriber  # imports numpy, which only this method needs

        transcriber, (adapter,) = Transcriber(await self.info(), options), adapters_of(options, 1)
        new_submit, context = partial(self._new_submit, adapter=adapter), ""
        if (given := transcriber.context) is not None:
            found = await self._ask(queries.words_query(given.text), wire.TokenIds)
            ids = decode_ids(found.token_ids).tolist()
            is_short = len(ids) <= given.max_tokens
            context = given.mark + (given.text if is_short else await self.detokenize(ids[-given.max_tokens :]))
        clip = await asyncio.to_thread(transcriber.clip, audio)
        if (question := clip.question(new_submit)) is not None:
            clip.name_language(await self._run_to_end(question))
        return clip.output(await self._run_together(clip.submits(new_submit, context), MAX_OPEN_PIECES))

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, **options: Unpack[AdapterOptions]
    ) -> BeamSearchOutput:
        """Return the likeliest continuations of one prompt, found by beam search. RequestError if the prompt is too
        long, or if the tokens that the model allows depend on their position in the answer."""
        check_options("beam_search", options, AdapterOptions)
        (adapter,) = adapters_of(options, 1)
        submit, info = self._new_submit(prompt, SamplingParams()), await self.info()
        token_ids = decode_ids(submit.prompt_token_ids or b"").tolist() or await self.tokenize(submit.prompt or "")
        search = BeamSearch([token_ids], params, info, [submit.media])
        while prompts := search.prompts():
            submits = [self._new_submit(each, search.sampling_params, adapter=adapter) for each in prompts]
            search.add(await asyncio.gather(*map(self._run_to_end, submits)))
        for beam, shown in search.finish():
            beam.text = await self.detokenize(shown) if info.tokenizer_folder else None
        return search.outputs[0]

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Call `load_adapter` with the name and the path of `lora_request`, and return True, as vLLM's AsyncLLM
        does."""
        await self.load_adapter(lora_request.lora_name, lora_request.lora_path)
        return True

    async def abort(self, request_id: str) -> None:
        """End a request, if it is open. Its last output has finish_reason abort and the tokens generated so far, with
        output_kind "delta" those since the output before."""
        self._transport.abort(request_id)

    # ── queries ──

    async def get_tokenizer(self) -> TransformersTokenizer:
        """Return the model's tokenizer, loaded with transformers in a thread, with the engine's chat template.
        RequestError if the tokenizer's folder does not exist on this machine."""
        return await asyncio.to_thread(load_tokenizer, await self.info())

    async def tokenize(self, prompt: str | Chat) -> list[int]:
        """Return the token ids of a text, as `generate` would get them, or of a chat, as `chat` would."""
        return decode_ids((await self._ask(queries.tokenize_query(prompt), wire.TokenIds)).token_ids).tolist()

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return (await self._ask(partial(wire.Detokenize, token_ids=check_token_ids(token_ids)), wire.Text)).text

    async def health(self) -> wire.Health:
        """Return the engine's state, load and restarts."""
        return await self._ask(wire.GetHealth, wire.Health)

    async def info(self) -> wire.Info:
        """Return the model, its limits and the engine's version."""
        found = await self._ask(wire.GetInfo, wire.Info)
        self._model = self._model or found.model
        return found

    async def get_metrics(self) -> list[Metric]:
        """Return the engine's counters, gauges and histograms, with the names of /metrics."""
        return (await self._ask(wire.GetMetrics, wire.Metrics)).metrics

    async def list_adapters(self) -> list[AdapterInfo]:
        """Return the LoRA adapters that are loaded. Those in --adapter-folder are loaded when a request first names
        them."""
        return (await self._ask(wire.ListAdapters, wire.Adapters)).adapters

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests that give none: the checkpoint's, unless the operator has set others."""
        return SamplingParams(**await self._default_params())

    async def is_sleeping(self) -> bool:
        return (await self.health()).is_asleep

    async def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache for later requests: the KV pool, not the tiers. Always True: running requests do not
        prevent it."""
        await self._control(queries.order_query("reset_prefix_cache"))
        return True

    async def prefetch_kv(self, prompt: Prompt, model: str | None = None) -> int:
        """Load a prompt's KV blocks from the disk, a remote store or peer engines into the engine's memory; give up
        after 30 s. Return the number of tokens of the prompt's prefix that need not be computed now. `model`: name of a
        LoRA adapter, as in `generate`. RequestError if the engine has no KV tiers, or `prompt` is a chat."""
        return (await self._ask(queries.prefetch_query(prompt, model), wire.Done)).num_tokens

    # ── lifetime ──

    async def close(self) -> None:
        """Disconnect, and abort open requests; an AsyncLLM also stops its engine. A second call does nothing."""
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

    # ── internals ──

    async def _default_params(self) -> dict[str, Any]:
        if self._defaults is None:
            self._defaults = (await self.info()).default_sampling_params
        return self._defaults

    async def _run(
        self, submit: wire.Submit, *, takes_defaults: bool = False, tools: ChatTools | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        if takes_defaults and (defaults := await self._default_params()):
            submit = msgspec.structs.replace(submit, params=submit.params.replace(**defaults))
        if tools is not None:
            submit = tools.apply(submit, await self._ask(tools.query, wire.AnswerFormIs))
        loop = asyncio.get_running_loop()
        if self._waker is None or self._waker.loop is not loop:
            self._waker = LoopWaker(loop)
        stream = AsyncStream(submit, self._waker, tools)
        self._transport.submit(submit, stream.put)
        try:
            while not stream.is_finished:
                output = await stream.next()
                if output is not None:
                    yield output
        finally:
            if not stream.is_finished:
                self._transport.cancel(submit.request_id)

    async def _run_to_end(self, submit: wire.Submit) -> RequestOutput:
        async with aclosing(self._run(submit)) as outputs:
            return await anext(output async for output in outputs if output.finished)

    async def _run_together(self, submits: Sequence[wire.Submit], max_open: int = MAX_OPEN) -> list[RequestOutput]:
        """Run requests of one call, at most `max_open` at a time. If one fails, abort the others."""
        room = asyncio.Semaphore(max_open)

        async def answer(submit: wire.Submit) -> RequestOutput:
            async with room:
                return await self._run_to_end(submit)

        tasks = [asyncio.ensure_future(answer(submit)) for submit in submits]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _ask(self, make_query: Callable[..., wire.Query], reply_type: type[ReplyType]) -> ReplyType:
        future: Future[QueryResult] = Future()
        future.set_running_or_notify_cancel()  # cancelling the task cannot cancel it: set_result would raise
        self._transport.query(make_query, future.set_result)
        return check_reply(await asyncio.wrap_future(future), reply_type)

    async def _control(self, make_query: Callable[..., wire.Query]) -> None:
        await self._ask(make_query, wire.Done)
