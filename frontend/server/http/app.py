"""new_app: the ASGI app of the HTTP server. GeneratingEndpoints decode bodies and start the work that they ask for.

Does not know the fields of bodies (`forms/openai/schema.py`) or the engine's messages (`api/openai/local_engine.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache, partial
from typing import TypeAlias

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import ASGIApp

from ....ipc.codec import num_ids
from ....ipc.errors import TokenloomError
from ....ipc.spec.config.comma_list import comma_list
from ....ipc.spec.config.engine_spec import EngineSpec
from ...forms.anthropic.request_body import CountTokensRequest, MessagesRequest, tokenize_request
from ...forms.anthropic.request_body import chat_request as chat_of_messages
from ...forms.anthropic.request_body import schema_field as schema_of_message
from ...forms.openai.embedding_body import CohereEmbedRequest, EmbeddingRequest, GenerativeScoringRequest
from ...forms.openai.errors import HttpError, encode_json, json_response, refusal_kind
from ...forms.openai.params import errors_about, prompt_errors_about, schema_errors_about, with_defaults
from ...forms.openai.response_body import ResponsesRequest, chat_request, schema_field
from ...forms.openai.schema import BatchChatRequest, ChatRequest, CompletionRequest
from ...forms.openai.transcription_body import TranscriptionRequest, TranslationRequest
from ...forms.pooling.pooling_body import ClassificationRequest, PoolingRequest, ScoreRequest
from ...forms.pooling.rerank_body import RerankRequest
from ...forms.pooling.tei_body import PredictRequest, SimilarityRequest, TeiEmbedRequest
from ...forms.speech.families import prompts_of
from ...listening.web_pages import WebPages
from ...state.responses import ResponseStore
from ..api.anthropic import MessageCreation
from ..api.keep_alive import KeepAlive
from ..api.openai.background_response import BackgroundResponse
from ..api.openai.chat import ChatCompletion
from ..api.openai.chat_batch import ChatBatch
from ..api.openai.choices import ChoicesResponse
from ..api.openai.cohere import CohereEmbeddings
from ..api.openai.completions import Completion
from ..api.openai.embeddings import Embeddings
from ..api.openai.events import EventStream, report_tokens, until_disconnect
from ..api.openai.generative_scoring import GenerativeScoring
from ..api.openai.local_engine import LocalEngine
from ..api.openai.responses import ResponseCreation
from ..api.openai.stored_responses import StoredResponses
from ..api.pooling.pooled_results import PooledResults
from ..api.pooling.pooling import Classification, Pooling
from ..api.pooling.scores import Reranking, Scores
from ..api.pooling.tei import Prediction, Similarities, TeiEmbeddings
from ..api.speech.transcription import Hearing, Transcription
from ..bodies.body_parser import BodyT, ParsedBody
from ..metrics.access_record import CLIENT_CLOSED_REQUEST
from ..metrics.tracing import TraceContext
from ..requests.engine_metrics import EngineMetrics
from ..requests.frontend import Frontend
from ..requests.queries import speech_of
from .admin import AdminEndpoints
from .control import ControlEndpoints
from .endpoint import Endpoint, routes
from .invocations import Invocations
from .load_report import FORMAT_HEADER, load_headers
from .middleware import HttpMiddleware
from .ollama import OllamaEndpoints
from .openapi import document
from .peers import Peers
from .responses import ResponseEndpoints
from .server_info import InfoEndpoints
from .streams.endpoints import StreamEndpoints
from .streams.resumable import ResumableStreams
from .web.pages import PageEndpoints

logger = logging.getLogger("tokenloom.http")

EXPOSED_HEADERS = ("x-request-id", "warning", "endpoint-load-metrics", "metadata", "x-stream-id")

Whole: TypeAlias = Embeddings | GenerativeScoring | PooledResults  # never streamed
Streamed: TypeAlias = ChoicesResponse | ResponseCreation | BackgroundResponse | MessageCreation | Transcription
Work: TypeAlias = Streamed | Whole  # a checked request


class GeneratingEndpoints:
    """Handlers of all endpoints that generate or embed, from completions to Anthropic's messages."""

    def __init__(
        self, engine: LocalEngine, metrics: EngineMetrics, spec: EngineSpec, store: ResponseStore, peers: Peers
    ) -> None:
        self._engine, self._metrics, self._peers = engine, metrics, peers
        self._spec = spec
        weights = "" if spec.digest is None else spec.digest.weights
        self.responses = StoredResponses(engine, store, self._chat_of, weights)
        template = "" if engine.inputs.chat_template is None else engine.inputs.chat_template.tool_source
        if template and "tools" not in template:
            logger.info(
                "the chat template has no place for tools: the system message shows them, in the form of Hermes"
            )
        self._ollama = OllamaEndpoints(engine, spec, self._chat, self._complete, self._refusals, template=template)

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Count a request as refused if this context raises an expected error. At this point the engine does not have
        the request yet."""
        try:
            yield
        except (HttpError, TokenloomError) as error:
            self._metrics.on_refused(refusal_kind(error))
            raise

    def endpoints(self) -> list[Endpoint]:
        stored = ResponseEndpoints(self._engine, self.responses, self._peers)
        return [
            *self.of_batches(),
            Endpoint("/v1/messages/count_tokens", self._count, "Token count of a message's prompt", CountTokensRequest),
            *self._audio_endpoints(),
            *stored.endpoints(),
            *self._ollama.endpoints(),
        ]

    def of_batches(self) -> list[Endpoint]:
        """Return the endpoints of batches: their bodies are JSON and may ask for one whole answer."""
        engine = self._engine
        chats = partial(ChatBatch.start_all, engine)
        embed, score = partial(Embeddings.start, engine), partial(GenerativeScoring.start, engine)
        return [
            self._endpoint("/v1/completions", "Text completions", CompletionRequest, self._complete, "prompt"),
            self._endpoint("/v1/chat/completions", "A chat completion", ChatRequest, self._chat, "messages"),
            self._endpoint(
                "/v1/chat/completions/batch", "Completions of several chats", BatchChatRequest, chats, "messages"
            ),
            self._endpoint(
                "/v1/responses", "A response (OpenAI Responses)", ResponsesRequest, self.responses.start, "input"
            ),
            self._endpoint("/v1/messages", "A message (Anthropic Messages)", MessagesRequest, self._reply, "messages"),
            self._endpoint("/v1/embeddings", "Embeddings of texts", EmbeddingRequest, embed, "input"),
            self._endpoint("/v1/embed", "Embeddings, Cohere v1", CohereEmbedRequest, partial(self._cohere, 1), "texts"),
            self._endpoint("/v2/embed", "Embeddings, Cohere v2", CohereEmbedRequest, partial(self._cohere, 2), "texts"),
            *self._pooling_endpoints(),
            self._endpoint("/generative_scoring", "Scores of labels", GenerativeScoringRequest, score, "items"),
        ]

    def _endpoint(
        self,
        path: str,
        summary: str,
        body_type: type[BodyT],
        start: Callable[[ParsedBody[BodyT], str], Awaitable[Work]],
        prompt_field: str,
    ) -> Endpoint:
        async def answer(request: Request) -> Response:
            with self._refusals(), prompt_errors_about(prompt_field):
                parsed = await self._engine.bodies.read(request, body_type)
                model = await self._engine.model_of(parsed.body)
                work = await start(parsed._replace(body=with_defaults(parsed.body, self._spec)), model)
            if not isinstance(work, Whole) and getattr(parsed.body, "stream", None):
                return EventStream(work.events(), work.end, work.idle)
            report_tokens(request.scope)
            whole = await until_disconnect(request.receive, work.whole())
            if whole is None:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            if isinstance(whole, Response):
                return whole
            headers = load_headers(request.headers.get(FORMAT_HEADER, ""), self._metrics)
            return Response(whole, headers=headers, media_type="application/json")

        return Endpoint(path, answer, summary, body_type)

    def _pooling_endpoints(self) -> list[Endpoint]:
        """Return the endpoints of scores, classes and token-level results; those that the model does not serve refuse
        every request."""
        engine = self._engine
        tasks = self._spec.model.pooling.tasks
        pool = partial(Pooling.start, engine)
        found = [
            self._endpoint("/pooling", "Results of any pooling task", PoolingRequest, pool, "input"),
            self._endpoint("/embed", "Embeddings, in TEI's form", TeiEmbedRequest, self._embed, "inputs"),
            self._endpoint("/similarity", "Cosines, in TEI's form", SimilarityRequest, self._compare, "inputs"),
        ]
        scored = (
            ("/score", "Scores of pairs of texts", ScoreRequest, self._score, "documents"),
            ("/v1/score", "Scores of pairs of texts", ScoreRequest, self._score, "documents"),
            ("/rerank", "Documents by relevance", RerankRequest, self._rerank, "documents"),
            ("/v1/rerank", "Documents by relevance, Jina and Cohere v1", RerankRequest, self._rerank, "documents"),
            ("/v2/rerank", "Documents by relevance, Cohere v2", RerankRequest, self._rerank, "documents"),
        )
        classified = (
            ("/classify", "Classes of texts", ClassificationRequest, self._classify, "input"),
            ("/predict", "Classes of texts, in TEI's form", PredictRequest, self._predict, "inputs"),
        )
        if "classify" in tasks:
            found += [self._endpoint(*each) for each in classified]
        else:
            found += [self._refused(path, form, "has no head that classifies") for path, _, form, *_ in classified]
        if "score" in tasks or "embed" in tasks:
            return found + [self._endpoint(*each) for each in scored]
        return found + [self._refused(path, form, "scores no pairs of texts") for path, _, form, *_ in scored]

    def _refused(self, path: str, body_type: type[msgspec.Struct], reason: str) -> Endpoint:
        """Return an endpoint that the model does not serve, for a reason; it is not listed."""

        async def refuse(request: Request) -> Response:
            async for _ in request.stream():  # a client may not read the answer before it has sent everything
                pass
            with self._refusals():
                name = f"{self._spec.served_model_name!r:.200}"
                raise HttpError(400, f"the model {name} {reason}: choose one that does", param="model")

        return Endpoint(path, refuse, body_type=body_type)

    def _audio_endpoints(self) -> list[Endpoint]:
        speech, spec = speech_of(self._spec.model), self._spec
        forms = (
            ("/v1/audio/transcriptions", "Text of a clip of speech", TranscriptionRequest),
            ("/v1/audio/translations", "Translation of a clip of speech", TranslationRequest),
        )
        if speech is None:
            return [self._refused(path, form, "does not hear audio") for path, _, form in forms]
        hearing = Hearing(
            speech.piece_s, prompts_of(speech), spec.default_sampling_params, self._metrics.answers.on_heard
        )
        start = partial(Transcription.start, self._engine, hearing)
        return [self._endpoint(path, summary, form, start, "file") for path, summary, form in forms]

    async def _complete(self, parsed: ParsedBody[CompletionRequest], model: str) -> Completion:
        return Completion(self._engine, parsed, model)

    async def _chat(self, parsed: ParsedBody[ChatRequest], model: str) -> ChatCompletion:
        return await ChatCompletion.start(self._engine, parsed, model)

    async def _chat_of(
        self, parsed: ParsedBody[ResponsesRequest], model: str
    ) -> tuple[ResponsesRequest, ChatCompletion]:
        body = with_defaults(parsed.body, self._spec)
        with schema_errors_about(schema_field(body)), errors_about("input", r"messages\b"):
            return body, await self._chat(ParsedBody(chat_request(body), parsed.inputs), model)

    async def _cohere(self, version: int, parsed: ParsedBody[CohereEmbedRequest], model: str) -> CohereEmbeddings:
        return CohereEmbeddings(self._engine, parsed, model, self._spec, version)

    async def _embed(self, parsed: ParsedBody[TeiEmbedRequest], model: str) -> TeiEmbeddings:
        return TeiEmbeddings(self._engine, parsed, model)

    async def _compare(self, parsed: ParsedBody[SimilarityRequest], model: str) -> Similarities:
        return Similarities(self._engine, parsed, model)

    async def _score(self, parsed: ParsedBody[ScoreRequest], model: str) -> Scores:
        return Scores(self._engine, parsed, model, self._spec.model.pooling.tasks)

    async def _rerank(self, parsed: ParsedBody[RerankRequest], model: str) -> Reranking:
        return Reranking(self._engine, parsed, model, self._spec.model.pooling.tasks)

    async def _classify(self, parsed: ParsedBody[ClassificationRequest], model: str) -> Classification:
        return await Classification.start(self._engine, self._labels, parsed, model)

    async def _predict(self, parsed: ParsedBody[PredictRequest], model: str) -> Prediction:
        return Prediction(self._engine, parsed, model, self._labels)

    @property
    def _labels(self) -> list[str]:
        """The names of the model's classes."""
        head = self._spec.model.pooling.head
        assert head is not None, "only a model with a head serves classes"
        return head.labels

    async def _reply(self, parsed: ParsedBody[MessagesRequest], model: str) -> MessageCreation:
        body = with_defaults(chat_of_messages(parsed.body), self._spec)
        schema = schema_errors_about(schema_of_message(parsed.body))
        budget = errors_about("thinking.budget_tokens", r"thinking_token_budget\b")
        with schema, budget, errors_about("stop_sequences", r"stop\b"):
            chat = await self._chat(ParsedBody(body, parsed.inputs), model)
        return MessageCreation(parsed.body, chat)

    async def _count(self, request: Request) -> Response:
        with self._refusals():
            parsed = await self._engine.bodies.read(request, CountTokensRequest)
            await self._engine.model_of(parsed.body)
            token_ids = await self._engine.chat_tokens(ParsedBody(tokenize_request(parsed.body), parsed.inputs))
        return json_response({"input_tokens": num_ids(token_ids)})


def new_app(
    engine: LocalEngine,
    frontend: Frontend,
    spec: EngineSpec,
    generating: list[Endpoint],
    peers: Peers,
    streams: ResumableStreams,
    stored: Sequence[Endpoint] = (),
) -> ASGIApp:
    """Return the ASGI app: routes, with HttpMiddleware around them. CORS, if set, is outermost, so that errors have its
    headers too. `stored`: endpoints of the state folder."""
    template = engine.inputs.chat_template
    others = (
        AdminEndpoints(engine, frontend, spec, peers),
        ControlEndpoints(engine, frontend, spec),
        InfoEndpoints(frontend, spec, None if template is None else template.source),
        PageEndpoints(engine, frontend, spec, peers),
        Invocations(generating, spec.model),
        StreamEndpoints(streams, peers),
    )
    endpoints = [*generating, *stored, *(each for group in others for each in group.endpoints())]

    @cache  # it takes 0.1 s, and anybody may ask for it
    def encoded_document() -> bytes:
        return encode_json(document(endpoints, spec))

    async def openapi(request: Request) -> Response:
        return Response(encoded_document(), media_type="application/json")

    endpoints.append(Endpoint("/openapi.json", openapi, "This document"))
    router = Router(routes(endpoints))
    config = spec.config
    middleware = HttpMiddleware(
        streams.around(router),
        frontend.keys,
        config.max_body_bytes,
        frontend.metrics.on_refused,
        config.root_path,
        WebPages.of(config),
        frontend.note,
        KeepAlive(config.sse_keep_alive_s),
    )
    if config.cors_origins is None:
        return middleware
    return CORSMiddleware(
        middleware,
        allow_origins=comma_list(config.cors_origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[*EXPOSED_HEADERS, *TraceContext._fields],
    )
