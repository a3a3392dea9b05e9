"""The routes of the HTTP server, and how a body becomes a call of an endpoint.

Knows no field of any body (`openai_schema.py`) and no protocol of the engine (`server_engine.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Iterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..ipc.engine_spec import EngineSpec
from ..ipc.errors import TokenloomError
from .metrics_engine import EngineMetrics
from .openai_answers import Answers
from .openai_chat import ChatCompletion
from .openai_completions import Completion
from .openai_embeddings import Embeddings
from .openai_errors import HttpError, refusal_kind, to_http_error
from .openai_reasoning import has_markers
from .openai_responses import ResponseCreation, ResponsesRequest
from .openai_schema import ChatRequest, CompletionRequest, EmbeddingRequest
from .openai_tools import ParserName, find_parser
from .server_admin import AdminEndpoints
from .server_body import check_model, read_body
from .server_dashboard import Dashboard
from .server_engine import LocalEngine
from .server_events import EventStream, until_disconnect
from .server_gate import Gate
from .service import Frontend
from .trace_context import TraceContext

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; nginx's number, for the metrics


class OpenAIEndpoints:
    """The endpoints that generate."""

    def __init__(self, engine: LocalEngine, metrics: EngineMetrics, spec: EngineSpec) -> None:
        self._engine, self._metrics = engine, metrics
        self._model = spec.served_model_name
        template = "" if engine.inputs.chat_template is None else engine.inputs.chat_template.source
        parser = spec.config.tool_call_parser
        self._tool_parser: ParserName = find_parser(template) if parser == "auto" else parser
        reasoning = spec.config.reasoning_parser
        self._has_reasoning = has_markers(template) if reasoning == "auto" else reasoning == "think"

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Count what is refused in here, where the engine does not know of the request."""
        try:
            yield
        except (HttpError, TokenloomError) as error:
            self._metrics.on_refused(refusal_kind(error))
            raise

    async def completions(self, request: Request) -> Response:
        with self._refusals():
            body = await read_body(request, CompletionRequest)
            check_model(body.model, self._model)
            completion = Completion(self._engine, body, self._model)
        return await _answer(request, completion, body.stream)

    async def chat_completions(self, request: Request) -> Response:
        with self._refusals():
            body = await read_body(request, ChatRequest)
            check_model(body.model, self._model)
            chat = await ChatCompletion.start(self._engine, body, self._model, self._tool_parser, self._has_reasoning)
        return await _answer(request, chat, body.stream)

    async def responses(self, request: Request) -> Response:
        with self._refusals():
            body = await read_body(request, ResponsesRequest)
            check_model(body.model, self._model)
            made = await ResponseCreation.start(self._engine, body, self._model, self._tool_parser, self._has_reasoning)
        return EventStream(made.events(), end=b"") if body.stream else await _whole(request, made.whole())

    async def embeddings(self, request: Request) -> Response:
        with self._refusals():
            body = await read_body(request, EmbeddingRequest)
            check_model(body.model, self._model)
            embeddings = Embeddings(self._engine, body, self._model)
        return await _whole(request, embeddings.whole())


async def _answer(request: Request, work: Answers, is_stream: bool | None) -> Response:
    return EventStream(work.events()) if is_stream else await _whole(request, work.whole())


async def _whole(request: Request, work: Coroutine[object, object, bytes]) -> Response:
    body = await until_disconnect(request.receive, work)
    if body is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(body, media_type="application/json")


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, a method that the path has not."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail.lower()}; /openapi.json lists what there is"
    return HttpError(error.status_code, message, headers=dict(error.headers or {})).response()


async def _on_error(request: Request, error: Exception) -> Response:
    """What an endpoint raised; the gate logs what was unforeseen."""
    return to_http_error(error).response()


def new_app(engine: LocalEngine, frontend: Frontend, spec: EngineSpec) -> ASGIApp:
    """The whole application: routes, the gate around them, and CORS around all of it, for pages that are refused."""
    openai, admin = OpenAIEndpoints(engine, frontend.metrics, spec), AdminEndpoints(engine, frontend, spec)
    routes = [
        Route("/v1/completions", openai.completions, methods=["POST"]),
        Route("/v1/chat/completions", openai.chat_completions, methods=["POST"]),
        Route("/v1/responses", openai.responses, methods=["POST"]),
        Route("/v1/embeddings", openai.embeddings, methods=["POST"]),
        *admin.routes(),
        *Dashboard(engine, frontend, spec).routes(),
    ]
    handlers = {
        HTTPException: _on_http_exception,
        HttpError: _on_error,
        TokenloomError: _on_error,
        Exception: _on_error,
    }
    starlette = Starlette(routes=routes, exception_handlers=handlers)
    gate = Gate(starlette, spec.config.api_key, spec.config.max_body_bytes, frontend.metrics.on_refused)
    if spec.config.cors_origins is None:
        return gate
    return CORSMiddleware(
        gate,
        allow_origins=[origin.strip() for origin in spec.config.cors_origins.split(",") if origin.strip()],
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", *TraceContext._fields],
    )
