"""/openapi.json: what the server serves, made from the same structs that decode the bodies."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .openai_errors import ErrorBody
from .openai_responses import ResponsesRequest
from .openai_schema import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from .server_gate import OPEN_PATHS
from .tokenizer import JsonObject

_POSTS: dict[str, tuple[type[msgspec.Struct], str, bool]] = {  # path: (body, summary, may stream)
    "/v1/completions": (CompletionRequest, "Continue texts", True),
    "/v1/chat/completions": (ChatRequest, "The next turn of a chat", True),
    "/v1/responses": (ResponsesRequest, "The next items of a conversation", True),
    "/v1/embeddings": (EmbeddingRequest, "The vectors of texts", False),
    "/tokenize": (TokenizeRequest, "The tokens of a text or a chat", False),
    "/detokenize": (DetokenizeRequest, "The text of tokens", False),
    "/abort": (AbortRequest, "End a request by the id of its answer", False),
}
_GETS: dict[str, tuple[str, str]] = {  # path: (summary, media type)
    "/v1/models": ("The model that is served", "application/json"),
    "/health": ("503 when requests are there and no step ends", "application/json"),
    "/ready": ("503 until a request would be served", "application/json"),
    "/version": ("The version", "application/json"),
    "/metrics": ("For Prometheus", "text/plain"),
    "/dashboard": ("A page with live numbers", "text/html"),
    "/openapi.json": ("This document", "application/json"),
}
_ERRORS = {
    "400": "The request cannot be served as asked",
    "401": "The API key is missing or wrong",
    "404": "No such model or request",
    "413": "The body is too large",
    "500": "A fault of the engine",
    "503": "Too busy, shutting down or restarting: ask again after Retry-After seconds",
}
_TOKENIZE_ONE: JsonObject = {  # of the two forms, the other one is null or left out
    "oneOf": [
        {"required": [this], "properties": {this: {"not": {"type": "null"}}, other: {"type": "null"}}}
        for this, other in (("prompt", "messages"), ("messages", "prompt"))
    ]
}


def document(version: str, needs_key: bool, maxima: Mapping[str, int]) -> JsonObject:
    """OpenAPI 3.1. `maxima`: of integers that depend on the model and the operator, by their title."""
    bodies = [body for body, _, _ in _POSTS.values()]
    (*schemas, _), components = msgspec.json.schema_components(
        [*bodies, ErrorBody], schema_hook=_anything, ref_template="#/components/schemas/{name}"
    )
    components["TokenizeRequest"] |= _TOKENIZE_ONE
    _limit(components, maxima)
    paths: JsonObject = {}
    for (path, (_, summary, may_stream)), schema in zip(_POSTS.items(), schemas, strict=True):
        paths[path] = {"post": _post(summary, schema, may_stream)}
    for path, (summary, media_type) in _GETS.items():
        is_open = path in OPEN_PATHS
        answers = _responses({media_type: {}}, ("503",) if is_open else ("401", "503"))
        paths[path] = {"get": {"summary": summary, "responses": answers} | ({"security": []} if is_open else {})}
    made: JsonObject = {
        "openapi": "3.1.0",
        "info": {"title": "tokenloom", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_key:
        made["components"] = {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        made["security"] = [{"key": []}]
    return made


def _limit(schema: object, maxima: Mapping[str, int]) -> None:
    """Set the maximum of every integer with one of these titles."""
    if isinstance(schema, dict):
        if schema.get("title") in maxima:
            schema["maximum"] = maxima[schema["title"]]
        for inner in schema.values():
            _limit(inner, maxima)
    elif isinstance(schema, list):
        for inner in schema:
            _limit(inner, maxima)


def _anything(kind: type) -> JsonObject:
    """`object`: any JSON value."""
    if kind is not object:
        raise NotImplementedError(f"{kind} has no JSON schema")
    return {"description": "any JSON value"}


def _post(summary: str, schema: JsonObject, may_stream: bool) -> JsonObject:
    content: JsonObject = {"application/json": {}}
    if may_stream:
        content["text/event-stream"] = {}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": _responses(content, tuple(_ERRORS)),
    }


def _responses(content: JsonObject, errors: tuple[str, ...]) -> JsonObject:
    failed: JsonObject = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    answers: JsonObject = {"200": {"description": "As asked", "content": content}}
    for status in errors:
        answers[status] = {"description": _ERRORS[status], "content": failed if status != "503" else {}}
    return answers
