"""The OpenAPI document /openapi.json: all endpoints that have a summary, with schemas from the structs of their bodies.

The sentences of fields stand in the structs (`forms/field.py`). Their limits and defaults are those of this engine and
its model. The page /docs shows this document and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.params.sampling_defaults import chat_sampling
from ....ipc.params.sampling_params import RANGES, SamplingParams
from ....ipc.spec.config.engine_spec import EngineSpec
from ....ipc.version import tokenloom_version
from ...forms.field import ABSENT, GROUP, OURS, UNUSED
from ...forms.ollama.request_body import Options
from ...forms.openai.embedding_body import EmbeddingRequest
from ...forms.openai.errors import ErrorBody
from ...forms.openai.files.file_object import FileRequest
from ...forms.openai.generation import TOKEN_ID, Body
from ...forms.openai.transcription_body import FORM_TYPE, AudioForm, Form
from .control import ReloadRequest
from .endpoint import Endpoint
from .middleware import OPEN_PATHS

Schema: TypeAlias = dict[str, Any]
_ERRORS = {
    "400": "The request cannot be served as asked",
    "401": "The API key is missing or wrong",
    "403": "A request that the server was not started to allow, or that needs a key while it has none",
    "404": "No such model or request",
    "413": "The body is too large",
    "429": "The API key is at a limit: try again after Retry-After seconds",
    "500": "An error of the engine",
    "503": "Too busy, shutting down or restarting: try again after Retry-After seconds",
    "529": "Too busy, in Anthropic's form",
}
_PARAMETERS = {"top_logprobs": "logprobs", "repeat_penalty": "repetition_penalty"}
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict")
SAMPLING = "sampling"  # the group of these, in APIs that have them
_SAMPLING = frozenset(
    (
        *_LENGTHS,
        *("temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of", "stop", "stop_sequences"),
        *("presence_penalty", "frequency_penalty", "repeat_penalty", "logit_bias", "logprobs", "top_logprobs"),
    )
)
NOT_SERVED = "not served"  # group of fields that take no value with an effect
FURTHER = "other fields of the API"
GROUPS = (SAMPLING, FURTHER, OURS, UNUSED, NOT_SERVED)  # the order of fields, behind those that are required
TAGS = {  # group of paths: what they are
    "OpenAI": "Answers, embeddings and transcripts in OpenAI's form",
    "Anthropic": "Messages in Anthropic's form",
    "Ollama": "Chats and embeddings in Ollama's form",
    "Cohere": "Embeddings in Cohere's form",
    "Scores": "Classes, scores and vectors in the forms of vLLM and Text Embeddings Inference",
    "Tokens": "Tokens of texts, scores of tokens, and the end of a request",
    "State": "What the engine is and does",
    "Control": "Orders that act on the whole engine",
    "Pages": "Pages for people, and this document",
}
_TAG_BY_PREFIX = {  # the first that matches; other paths are Control
    "/v1/messages": "Anthropic",
    "/api/": "Ollama",
    "/v1/embeddings": "OpenAI",
    "/v1/embed": "Cohere",
    "/v2/": "Cohere",
    "/v1/rerank": "Scores",
    "/v1/score": "Scores",
    "/v1/load_lora": "Control",
    "/v1/unload_lora": "Control",
    "/v1/": "OpenAI",
    **dict.fromkeys(("/tokenize", "/detokenize", "/abort", "/generative_scoring"), "Tokens"),
    **dict.fromkeys(("/pooling", "/classify", "/score", "/rerank", "/embed", "/similarity", "/predict"), "Scores"),
    **dict.fromkeys(("/dashboard", "/chat", "/docs", "/openapi.json"), "Pages"),
    **dict.fromkeys(("/health", "/ready", "/ping", "/load", "/version", "/metrics", "/server_info"), "State"),
    "/tokenizer_info": "State",
}
_USUAL = SamplingParams()
_OR_MESSAGES = {  # exactly one of the two fields is given
    "TokenizeRequest": "prompt",
    **dict.fromkeys(("EmbeddingRequest", "PoolingRequest", "ClassificationRequest"), "input"),
}


def document(endpoints: Iterable[Endpoint], spec: EngineSpec) -> JsonObject:
    """Return the OpenAPI 3.1 document of the endpoints that have a summary."""
    listed = [each for each in endpoints if each.summary]
    bodies = [each.body_type for each in listed if each.body_type is not None]
    schemas, components = msgspec.json.schema_components(
        [*bodies, *{each.error_type: None for each in listed}],
        schema_hook=_anything,
        ref_template="#/components/schemas/{name}",
    )
    for title, field in _OR_MESSAGES.items():
        if title not in components:  # the model does not serve it
            continue
        components[title]["oneOf"] = [
            {"required": [this], "properties": {this: {"not": {"type": "null"}}, other: {"type": "null"}}}
            for this, other in ((field, "messages"), ("messages", field))
        ]
    strict = {each.__name__ for each in bodies if not issubclass(each, Body)}
    not_served = {each.__name__: each.NOT_SERVED for each in bodies if issubclass(each, Body)}
    for title, component in components.items():
        if not spec.config.strict_fields and title not in strict:
            component.pop("additionalProperties", None)
        if "properties" in component:
            component["properties"] = _described(title, component, not_served.get(title, {}), spec)
    _limit_ids(components, spec.model.vocab_size - 1)
    schema_by_body = dict(zip(bodies, schemas, strict=False))
    paths: dict[str, JsonObject] = {}
    for each in listed:
        operation = paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
        if each.body_type is not None:
            body, schema = components[each.body_type.__name__], schema_by_body[each.body_type]
            needs_body = bool(body["required"]) or "oneOf" in body
            media_type = FORM_TYPE if issubclass(each.body_type, (Form, FileRequest)) else "application/json"
            content = {media_type: {"schema": schema, "example": _example(each.body_type, body, spec)}}
            operation["requestBody"] = {"required": needs_body, "content": content}
    made: JsonObject = {
        "openapi": "3.1.0",
        "info": {"title": "tokenloom", "version": tokenloom_version()},
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {"schemas": components},
    }
    if spec.config.root_path:
        made["servers"] = [{"url": spec.config.root_path}]
    if spec.config.has_keys:
        made["components"] = {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        made["security"] = [{"key": []}]
    return made


def _described(title: str, component: Schema, not_served: Mapping[str, Sequence[object]], spec: EngineSpec) -> Schema:
    """Return the fields of a component with their limits, groups and defaults, those that are required first, then in
    the order of GROUPS."""
    fields: dict[str, Schema] = component["properties"]
    required: list[str] = component["required"]
    defaults: Mapping[str, float] = {}
    if "temperature" in fields:
        defaults = spec.default_sampling_params
    if title == Options.__name__:  # Ollama's API is for chats with people
        defaults = chat_sampling(defaults)
    for name, field in fields.items():
        if name in not_served:
            field |= {"enum": [None, *not_served[name]], GROUP: NOT_SERVED}
        else:
            _limit(name, field, spec)
            field.setdefault(GROUP, SAMPLING if name in _SAMPLING else FURTHER)
        _set_default(name, field, defaults, is_required=name in required)
    places = {name: -1 if name in required else GROUPS.index(field[GROUP]) for name, field in fields.items()}
    return {name: fields[name] for name in sorted(fields, key=places.__getitem__)}


def _set_default(name: str, field: Schema, defaults: Mapping[str, float], *, is_required: bool) -> None:
    """Set a field's default to its value for this model, or ABSENT to words that say what holds without the field."""
    absent = field.pop(ABSENT, None)
    if is_required:
        return
    parameter = "max_tokens" if name in _LENGTHS else _PARAMETERS.get(name, name)
    usual = defaults.get(parameter, getattr(_USUAL, parameter, None))
    if not isinstance(absent, str | None):
        field["default"] = absent
    elif parameter in defaults or (absent is None and field["default"] is None and usual is not None):
        field["default"] = usual
    elif absent is not None or field["default"] is None or isinstance(field["default"], dict):
        field |= {"default": None, ABSENT: absent or "none"}


def _example(body_type: type[msgspec.Struct], body: Schema, spec: EngineSpec) -> Schema:
    """Return a body that this engine answers."""
    example: Schema = dict(getattr(body_type, "EXAMPLE", {}))
    if body_type is ReloadRequest:
        example["model"] = spec.config.model or spec.model_folder
    if issubclass(body_type, Body) and "model" in body["properties"]:
        return {"model": spec.served_model_name} | example
    return example


def _limit(name: str, field: Schema, spec: EngineSpec) -> None:
    """Add minimum and maximum to a field that is a sampling parameter, unless its type already has limits."""
    limits = RANGES.get(_PARAMETERS.get(name, name))
    if limits is None:
        return
    if name.endswith("logprobs"):  # -1 means all tokens
        limits = limits._replace(low=0 if spec.max_logprobs < spec.model.vocab_size else -1, high=spec.max_logprobs)
    forms = field.get("anyOf", [field])
    assert isinstance(forms, list)
    for form in forms:
        if form.get("type") in ("integer", "number") and "minimum" not in form:
            form |= {"exclusiveMinimum" if limits.excludes_low else "minimum": limits.low, "maximum": limits.high}


def _limit_ids(schema: object, highest: int) -> None:
    """Set the maximum of every token id in a schema, in place. Token ids are the schemas with the title TOKEN_ID."""
    if isinstance(schema, dict):
        if schema.get("title") == TOKEN_ID:
            schema["maximum"] = highest
        schema = list(schema.values())
    if isinstance(schema, list):
        for inner in schema:
            _limit_ids(inner, highest)


def _anything(kind: type) -> JsonObject:
    """Return a schema that allows any JSON value, for fields of type `object` (msgspec's schema_hook)."""
    if kind is not object:
        raise NotImplementedError(f"{kind} has no JSON schema")
    return {"description": "any JSON value"}


def _operation(endpoint: Endpoint) -> JsonObject:
    names = re.findall(r"{(\w+)}", endpoint.path)
    content: JsonObject = {endpoint.media_type: {}}
    if "stream" in getattr(endpoint.body_type, "__struct_fields__", ()):
        content["text/event-stream"] = {}
    if endpoint.body_type is not None and issubclass(endpoint.body_type, EmbeddingRequest):
        content["application/octet-stream"] = {}
    if endpoint.body_type is not None and issubclass(endpoint.body_type, AudioForm):
        content |= {"text/plain": {}, "text/vtt": {}}
    failures = {"401", "503", *(("400", "404") if names else ())} if endpoint.body_type is None else set(_ERRORS)
    tag = next((tag for prefix, tag in _TAG_BY_PREFIX.items() if endpoint.path.startswith(prefix)), "Control")
    operation: JsonObject = {"tags": [tag], "summary": endpoint.summary}
    operation["responses"] = _responses(endpoint, content, failures)
    if names:
        path = {"in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [{"name": name, **path} for name in names]
    if endpoint.path in OPEN_PATHS:
        operation["security"] = []
    return operation


def _responses(endpoint: Endpoint, content: JsonObject, failures: set[str]) -> JsonObject:
    name = endpoint.error_type.__name__
    failed: JsonObject = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    if endpoint.path in OPEN_PATHS:
        failures -= {"401"}
    if endpoint.error_type is ErrorBody:
        failures -= {"529"}
    answers: JsonObject = {"200": {"description": "As asked", "content": content}}
    for status in sorted(failures):
        answers[status] = {"description": _ERRORS[status], "content": failed if status != "503" else {}}
    return answers
