"""Client: synchronous client of a running engine. Any number of threads may share one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain, islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar, Unpack

from ...ipc.codec import decode_ids
from ...ipc.errors import RequestError, TokenloomError
from ...ipc.messages import client as wire
from ...ipc.messages.adapter import AdapterInfo
from ...ipc.messages.metrics import Metric
from ...ipc.params.beam_search_params import BeamSearchParams
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
from ..forms.prompts import (
    Chat,
    CheckedChat,
    Prompt,
    check_params,
    check_token_ids,
    list_chats,
    list_clips,
    list_pairs,
    list_params,
    list_prompts,
    read_chat,
)
from .base_client import BaseClient, new_tools
from .batch import RequestBatch
from .offline.beam_search import BeamSearch, BeamSearchOutput
from .offline.tokenizer import TransformersTokenizer, load_tokenizer
from .open_request import Update
from .outputs import OutputBuilder, RequestOutput, TranscriptionOutput
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
from .request_future import RequestFuture

if TYPE_CHECKING:
    from .chat_tools import ChatTools

ParamsType = TypeVar("ParamsType", bound=SamplingParams | Sequence[SamplingParams])


class Client(BaseClient[None]):
    """Synchronous client of a running engine. `close`, which `with` calls at its end, aborts its open requests."""

    _waits_for_engine = True

    # ── requests ──

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **options: Unpack[CallOptions],
    ) -> list[RequestOutput]:
        """Generate completions of all prompts; the outputs are in the order of the prompts.

        A prompt is text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. The dicts may also have media, for
        placeholders in the prompt: "multi_modal_data": {"image": PIL image, path, bytes, URL or list of these}, or
        {"audio": (samples, rate), path, bytes, URL or list of these}. `sampling_params`: one for all prompts, or a list
        with one for each. If a prompt fails, the others are aborted and its error is raised.
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
        """Generate the next turn of one conversation, or of each of several. A message is {"role": …, "content": …}.

        With `tools` each completion has its answer as `message`, with the calls in it, for the next turn, and the calls
        as `tool_calls`, beside `text` as the model wrote it.
        """
        check_options("chat", options, ChatOptions)
        chats = [read_chat(chat) for chat in list_chats(messages)]
        return self._run_all(chats, self._or_default(sampling_params), use_tqdm, options, new_tools(options))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        **options: Unpack[PoolOptions],
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of all prompts, in the order of the prompts.

        `truncate_prompt_tokens`, `priority` and `timeout_s` mean the same as in SamplingParams. If a prompt fails, its
        error is raised, here and by the methods below; that is RequestError if the prompt exceeds its timeout, or if
        the model does not serve the task.
        """
        check_options("embed", options, PoolOptions)
        submits = self._pool_submits(list_prompts(prompts), pooling_params, "embed", options)
        return list(map(to_embedding, self._run(submits, use_tqdm)))

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        **options: Unpack[PoolOptions],
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of the classes of each prompt, of a model with a classification head."""
        check_options("classify", options, PoolOptions)
        submits = self._pool_submits(list_prompts(prompts), pooling_params, "classify", options)
        return list(map(to_classification, self._run(submits, use_tqdm)))

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        use_tqdm: bool = True,
        **options: Unpack[PoolOptions],
    ) -> list[PoolingRequestOutput]:
        """Return the results of a task for all prompts; by default, of the model's own task."""
        check_options("encode", options, PoolOptions)
        submits = self._pool_submits(list_prompts(prompts), pooling_params, pooling_task, options)
        return list(map(to_pooling, self._run(submits, use_tqdm)))

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        **options: Unpack[PoolOptions],
    ) -> list[PoolingRequestOutput]:
        """Return the rewards of all prompts, a row for each token, of a reward model."""
        check_options("reward", options, PoolOptions)
        submits = self._pool_submits(list_prompts(prompts), pooling_params, "token_classify", options)
        return list(map(to_pooling, self._run(submits, use_tqdm)))

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        **options: Unpack[PoolOptions],
    ) -> list[ScoringRequestOutput]:
        """Return a score for each pair of texts: one text with each of many, or two lists item by item. A model that
        has no head for pairs gives the cosine of their embeddings."""
        check_options("score", options, PoolOptions)
        info, pairs = self.info(), list_pairs(data_1, data_2)
        outputs = self._run(self._pair_submits(pairs, pooling_params, info, options), use_tqdm)
        return to_scores(outputs, pairs, has_pairs="score" in info.pooling_tasks)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        **options: Unpack[PoolOptions],
    ) -> list[RerankResult]:
        """Return the documents by falling scores for the query, as `score` gives them; only the first `top_n`."""
        check_options("rerank", options, PoolOptions)
        scores = self.score(query, documents, pooling_params, use_tqdm=use_tqdm, **options)
        return ranked(documents, scores, top_n)

    def transcribe(
        self, audio: object, *, use_tqdm: bool = False, **options: Unpack[TranscribeOptions]
    ) -> list[TranscriptionOutput]:
        """Transcribe one audio clip or a list of them; the outputs are in the order of the clips.

        A clip is (samples, rate), the bytes of a file, or a path, and may have any length. It is decoded in this
        process and cut at quiet places into pieces, each of which is a request. With `to_language` the result is a
        translation. Needs numpy. If a piece fails, the others are aborted and its error is raised.
        """
        from .speech.transcriber import Transcriber  # imports numpy, which only this method needs

        transcriber, (adapter,) = Transcriber(self.info(), options), adapters_of(options, 1)
        new_submit, context = partial(self._new_submit, adapter=adapter), ""
        if (given := transcriber.context) is not None:
            ids = decode_ids(self._ask(queries.words_query(given.text), wire.TokenIds).token_ids).tolist()
            is_short = len(ids) <= given.max_tokens
            context = given.mark + (given.text if is_short else self.detokenize(ids[-given.max_tokens :]))
        clips = [transcriber.clip(each) for each in list_clips(audio)]
        questions = [(clip, submit) for clip in clips if (submit := clip.question(new_submit)) is not None]
        for (clip, _), answer in zip(questions, self._run([each for _, each in questions], False), strict=True):
            clip.name_language(answer)
        submits = [clip.submits(new_submit, context) for clip in clips]
        answers = iter(self._run(list(chain.from_iterable(submits)), use_tqdm))
        return [clip.output(list(islice(answers, len(clip.pieces)))) for clip in clips]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,  # ignored: the scheduler limits concurrency
        **options: Unpack[AdapterOptions],
    ) -> list[BeamSearchOutput]:
        """Return the likeliest continuations of each prompt, found by beam search. RequestError if a prompt is too
        long, or if the tokens that the model allows depend on their position in the answer."""
        check_options("beam_search", options, AdapterOptions)
        (adapter,) = adapters_of(options, 1)
        submits, info = [self._new_submit(prompt, SamplingParams()) for prompt in list_prompts(prompts)], self.info()
        token_ids = [
            decode_ids(submit.prompt_token_ids or b"").tolist() or self.tokenize(submit.prompt or "")
            for submit in submits
        ]
        search = BeamSearch(token_ids, params, info, [submit.media for submit in submits])
        while prompts_of_round := search.prompts():
            search.add(self.generate(prompts_of_round, search.sampling_params, use_tqdm, lora_request=adapter))
        for beam, shown in search.finish():
            beam.text = self.detokenize(shown) if info.tokenizer_folder else None
        return search.outputs

    def submit(
        self,
        prompt: Prompt | Chat,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[AdapterOptions],
    ) -> Future[RequestOutput]:
        """Submit a request and return its future, without waiting for the answer. `future.cancel()` and
        `abort(request_id)` abort the request."""
        check_options("submit", options, AdapterOptions)
        params, (adapter,) = check_params(self._or_default(sampling_params)), adapters_of(options, 1)
        submit = self._new_submit(prompt, params, request_id, adapter=adapter)
        future = RequestFuture(self._transport, submit)
        self._transport.submit(submit, future.add)
        return future

    def stream(
        self,
        prompt: Prompt | Chat,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[AdapterOptions],
    ) -> Generator[str, None, RequestOutput]:
        """Yield the text of one completion as it is generated. The generator's return value, which `yield from` passes
        on, is the whole output. Closing the generator aborts the request. RequestError if n is above 1."""
        check_options("stream", options, AdapterOptions)
        params, (adapter,) = check_params(self._or_default(sampling_params)), adapters_of(options, 1)
        if params.n > 1:
            raise RequestError(
                f"stream() yields one completion, n is {params.n}: use submit() or AsyncClient.generate()"
            )
        return self._stream(self._new_submit(prompt, params, request_id, adapter=adapter))

    def abort(self, request_id: str) -> None:
        """End a request, if it is open: its last output has the tokens generated so far and finish_reason abort."""
        self._transport.abort(request_id)

    # ── queries ──

    def get_tokenizer(self) -> TransformersTokenizer:
        """Return the model's tokenizer, loaded with transformers, with the engine's chat template.

        RequestError if the tokenizer's folder does not exist on this machine.
        """
        return load_tokenizer(self.info())

    def tokenize(self, prompt: str | Chat) -> list[int]:
        """Return the token ids of a text, as `generate` would get them, or of a chat, as `chat` would."""
        return decode_ids(self._ask(queries.tokenize_query(prompt), wire.TokenIds).token_ids).tolist()

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._ask(partial(wire.Detokenize, token_ids=check_token_ids(token_ids)), wire.Text).text

    def health(self) -> wire.Health:
        """Return the engine's state, load and restarts."""
        return self._ask(wire.GetHealth, wire.Health)

    def info(self) -> wire.Info:
        """Return the model, its limits and the engine's version."""
        found = self._ask(wire.GetInfo, wire.Info)
        self._model = self._model or found.model
        return found

    def get_metrics(self) -> list[Metric]:
        """Return the engine's counters, gauges and histograms, with the names of /metrics."""
        return self._ask(wire.GetMetrics, wire.Metrics).metrics

    def list_adapters(self) -> list[AdapterInfo]:
        """Return the LoRA adapters that are loaded. Those in --adapter-folder are loaded when a request first names
        them."""
        return self._ask(wire.ListAdapters, wire.Adapters).adapters

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests that give none: the checkpoint's, unless the operator has set others."""
        if self._defaults is None:
            self._defaults = self.info().default_sampling_params
        return SamplingParams(**self._defaults)

    def is_sleeping(self) -> bool:
        return self.health().is_asleep

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache for later requests: the KV pool, not the tiers. Always True: running requests do not
        prevent it."""
        self._control(queries.order_query("reset_prefix_cache"))
        return True

    def prefetch_kv(self, prompt: Prompt, model: str | None = None) -> int:
        """Load a prompt's KV blocks from the disk, a remote store or peer engines into the engine's memory; give up
        after 30 s. Return the number of tokens of the prompt's prefix that need not be computed now. `model`: name of a
        LoRA adapter, as in `generate`. RequestError if the engine has no KV tiers, or `prompt` is a chat."""
        return self._ask(queries.prefetch_query(prompt, model), wire.Done).num_tokens

    # ── lifetime ──

    def close(self) -> None:
        """Disconnect, and abort open requests; an LLM also stops its engine. A second call does nothing."""
        self._finalizer()

    # ── internals ──

    def _or_default(self, params: ParamsType | None) -> ParamsType | SamplingParams:
        return self.get_default_sampling_params() if params is None else params

    def _run_all(
        self,
        prompts: Sequence[Prompt | Chat | CheckedChat],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        use_tqdm: bool,
        options: ChatOptions | CallOptions,
        tools: ChatTools | None = None,
    ) -> list[RequestOutput]:
        params, form = with_priority(list_params(sampling_params, len(prompts)), options), chat_form(options)
        adapters = adapters_of(options, len(prompts))
        submits = [
            self._new_submit(prompt, each, form=form, adapter=adapter)
            for prompt, each, adapter in zip(prompts, params, adapters, strict=True)
        ]
        if tools is not None:
            found = self._ask(tools.query, wire.AnswerFormIs)
            submits = [tools.apply(submit, found) for submit in submits]
        return self._run(submits, use_tqdm, tools)

    def _run(self, submits: list[wire.Submit], use_tqdm: bool, tools: ChatTools | None = None) -> list[RequestOutput]:
        return RequestBatch(self._transport, submits, use_tqdm, tools).run()

    def _stream(self, submit: wire.Submit) -> Generator[str, None, RequestOutput]:
        updates: SimpleQueue[Update] = SimpleQueue()
        builder = OutputBuilder(submit)
        self._transport.submit(submit, updates.put)
        try:
            while not builder.is_finished:
                update = self._transport.wait(updates)
                builder.add(update)
                if isinstance(update, TokenloomError):
                    raise update
                if isinstance(update, wire.Delta) and update.text:
                    yield update.text
            return builder.build()
        finally:
            if not builder.is_finished:
                self._transport.cancel(submit.request_id)

    def _ask(self, make_query: Callable[..., wire.Query], reply_type: type[ReplyType]) -> ReplyType:
        replies: SimpleQueue[QueryResult] = SimpleQueue()
        self._transport.query(make_query, replies.put)
        return check_reply(self._transport.wait(replies), reply_type)

    def _control(self, make_query: Callable[..., wire.Query]) -> None:
        self._ask(make_query, wire.Done)
