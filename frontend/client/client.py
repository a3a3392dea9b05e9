"""Client: attaches to a running engine from any program, and from any number of threads at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar, Unpack

from ...ipc.beam_search_params import BeamSearchParams
from ...ipc.codec import decode_ids
from ...ipc.errors import RequestError, TokenloomError
from ...ipc.messages.base import MemoryTag
from ...ipc.messages.client import (
    Control,
    Delta,
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
from .batch import RequestBatch
from .call_options import CallOptions, ChatOptions, UnservedOptions, chat_form, check_options, with_priority
from .offline.beam_search import BeamSearch, BeamSearchOutput
from .offline.tokenizer import TransformersTokenizer, load_tokenizer
from .open_request import Update
from .outputs import EmbeddingRequestOutput, OutputBuilder, RequestOutput, to_embedding
from .prompts import Chat, Prompt, check_chat, check_params, check_token_ids, list_chats, list_params, list_prompts
from .protocol import QueryResult, ReplyType, check_reply
from .request_future import RequestFuture

ParamsType = TypeVar("ParamsType", bound=SamplingParams | Sequence[SamplingParams])


class Client(BaseClient):
    """A program's side of an engine. Close it, or use it as a context manager; what is open then is aborted."""

    _waits_for_engine = True

    # ── answers ──

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **options: Unpack[CallOptions],
    ) -> list[RequestOutput]:
        """Answers to all prompts, in their order.

        A prompt is text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; SamplingParams are one for all or
        one each. A prompt that cannot be served raises its error, after the others are aborted.
        """
        check_options("generate", options, CallOptions)
        return self._run_all(list_prompts(prompts), self._or_default(sampling_params), use_tqdm, options)

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """The next turn of one conversation, or of each of many; a message is {"role": …, "content": …}."""
        check_options("chat", options, ChatOptions)
        chats = [check_chat(chat) for chat in list_chats(messages)]
        return self._run_all(chats, self._or_default(sampling_params), use_tqdm, options)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        use_tqdm: bool = True,
        **options: Unpack[UnservedOptions],
    ) -> list[EmbeddingRequestOutput]:
        """The vectors of all prompts, in their order; see PoolingParams. What is given by name is as in SamplingParams.

        A prompt that cannot be served, or was not embedded in time, raises its error.
        """
        check_options("embed", options, UnservedOptions)
        listed = list_prompts(prompts)
        submits = self._embed_submits(listed, pooling_params, None, truncate_prompt_tokens, priority, timeout_s)
        return [to_embedding(output) for output in self._run(submits, use_tqdm)]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,  # the engine schedules what it can hold, whatever this is
        **options: Unpack[UnservedOptions],
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of all prompts that a search of `beam_width` finds."""
        check_options("beam_search", options, UnservedOptions)
        submits, info = [self._submit_of(prompt, SamplingParams()) for prompt in list_prompts(prompts)], self.info()
        token_ids = [
            decode_ids(submit.prompt_token_ids or b"").tolist() or self.tokenize(submit.prompt or "")
            for submit in submits
        ]
        search = BeamSearch(token_ids, params, info)
        while requests := search.requests():
            search.take(self.generate(requests, search.sampling_params, use_tqdm))
        for beam, shown in search.finish():
            beam.text = self.detokenize(shown) if info.tokenizer_folder else None
        return search.outputs

    def submit(
        self, prompt: Prompt | Chat, sampling_params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Future[RequestOutput]:
        """Ask without waiting. `cancel()` on the future aborts; `request_id` is there for `abort`."""
        submit = self._submit_of(prompt, check_params(self._or_default(sampling_params)), request_id)
        future = RequestFuture(self._transport, submit)
        self._transport.submit(submit, future.take)
        return future

    def stream(
        self, prompt: Prompt | Chat, sampling_params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Iterator[str]:
        """The answer's text, piece by piece as it is made. Closing the iterator aborts the request."""
        params = check_params(self._or_default(sampling_params))
        if params.n > 1:
            raise RequestError(
                f"a stream of text shows one answer, n is {params.n}: use submit, or AsyncClient.generate"
            )
        return self._stream(self._submit_of(prompt, params, request_id))

    def abort(self, request_id: str) -> None:
        """End a request: whoever waits for it gets what there is, with finish_reason abort."""
        self._transport.abort(request_id)

    # ── questions ──

    def get_tokenizer(self) -> TransformersTokenizer:
        """transformers' tokenizer of the model, with the engine's chat template, where its files can be read."""
        return load_tokenizer(self.info())

    def tokenize(self, prompt: str | Chat) -> list[int]:
        """The token ids that the engine would compute for a text or a chat."""
        return decode_ids(self._ask(tokenize_query(prompt), TokenIds).token_ids).tolist()

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._ask(partial(Detokenize, token_ids=check_token_ids(token_ids)), Text).text

    def health(self) -> Health:
        """Whether requests are served and steps end."""
        return self._ask(GetHealth, Health)

    def info(self) -> Info:
        """What the engine serves: model, sizes, version."""
        return self._ask(GetInfo, Info)

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms of the engine under their names on /metrics."""
        return self._ask(GetMetrics, Metrics).metrics

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without parameters get: the checkpoint's own defaults, or what the operator chose."""
        if self._defaults is None:
            self._defaults = self.info().default_sampling_params
        return new_params(self._defaults)

    # ── control ──

    def pause(self, mode: PauseMode = "keep") -> None:
        """Begin nothing new until `resume`; returns when it is so. keep: running requests stop where they are; wait:
        they finish first; abort: all end with finish_reason abort."""
        self._ask(pause_query(mode), Done)

    def resume(self) -> None:
        """Go on after a pause; without one, nothing happens."""
        self._ask(partial(Control, action="resume"), Done)

    def reload(self, model: str | os.PathLike[str]) -> None:
        """Take the weights of another checkpoint of the same architecture; open requests go on with them."""
        self._ask(reload_query(model), Done)

    def sleep(self, level: int = 1, mode: PauseMode = "keep") -> None:
        """Give the memory of weights and KV pool back, until `wake_up`. Requests wait meanwhile, those that run too (as
        `mode` of `pause` says). 1: the checkpoint stays in the machine's page cache; 2: it leaves that, too."""
        self._ask(sleep_query(level, mode), Done)

    def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Take the memory again, all or what is named ("weights", "kv_cache"), and go on once all of it is there."""
        self._ask(wake_up_query(tags), Done)

    def is_sleeping(self) -> bool:
        return self.health().is_asleep

    def reset_prefix_cache(self) -> bool:
        """Have no request that begins later find what is cached now; True, since running requests do not hinder it."""
        self._ask(partial(Control, action="reset_prefix_cache"), Done)
        return True

    def start_profile(self) -> None:
        """Have every worker record what torch does, until `stop_profile`. RequestError if one is running already."""
        self._ask(partial(Control, action="start_profile"), Done)

    def stop_profile(self) -> None:
        """Have each write its Chrome trace into the engine's `profile_dir`; returns when it is there. RequestError
        without `start_profile`, or if a worker or the core was replaced since."""
        self._ask(partial(Control, action="stop_profile"), Done)

    def set_log_level(self, level: LogLevel) -> None:
        """Have every process of the engine, those that are started later too, log what is at least this bad."""
        self._ask(log_level_query(level), Done)

    # ── its life ──

    def close(self) -> None:
        """Let go of the engine; a second call does nothing."""
        self._finalizer()

    # ── how ──

    def _or_default(self, params: ParamsType | None) -> ParamsType | SamplingParams:
        return self.get_default_sampling_params() if params is None else params

    def _run_all(
        self,
        prompts: Sequence[Prompt | Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        use_tqdm: bool,
        options: ChatOptions | CallOptions,
    ) -> list[RequestOutput]:
        params, form = with_priority(list_params(sampling_params, len(prompts)), options), chat_form(options)
        submits = [self._submit_of(*each, form=form) for each in zip(prompts, params, strict=True)]
        return self._run(submits, use_tqdm)

    def _run(self, submits: list[Submit], use_tqdm: bool) -> list[RequestOutput]:
        return RequestBatch(self._transport, submits, show_progress=use_tqdm).run()

    def _stream(self, submit: Submit) -> Iterator[str]:
        updates: SimpleQueue[Update] = SimpleQueue()
        builder = OutputBuilder(submit)
        self._transport.submit(submit, updates.put)
        try:
            while not builder.is_finished:
                update = self._transport.wait(updates)
                builder.add(update)
                if isinstance(update, TokenloomError):
                    raise update
                if isinstance(update, Delta) and update.text:
                    yield update.text
        finally:
            if not builder.is_finished:
                self._transport.cancel(submit.request_id)

    def _ask(self, make_query: Callable[..., Query], reply_type: type[ReplyType]) -> ReplyType:
        replies: SimpleQueue[QueryResult] = SimpleQueue()
        self._transport.query(make_query, replies.put)
        return check_reply(self._transport.wait(replies), reply_type)
