"""Fill in the operator's defaults and convert the fields of a request to SamplingParams.

A field that the engine does not support is refused by name. OpenAI's bookkeeping fields (user, metadata, store …) are
accepted and have no effect.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from ....ipc.errors import RequestError
from ....ipc.params.sampling_params import LENGTH, SamplingParams
from ....ipc.params.structured_outputs import StructuredOutputsParams
from ....ipc.spec.config.engine_spec import EngineSpec
from .generation import Body, Generation, Scheduled, StreamOptions
from .schema import ChatRequest

BodyT = TypeVar("BodyT", bound=msgspec.Struct)
_GUIDED = ("json", "regex", "choice", "grammar")
_STYLE = ("disable_any_whitespace", "disable_additional_properties", "includes_thought")
_SCHEMA = "response_format.json_schema.schema"
_INSTEAD = {  # unsupported field → how else to get its effect; other fields can only be left out
    "suffix": "put the prompt and the suffix into `prompt`, with the model's own markers of the gap",
    "audio": "answers are text, leave it out",
    "modalities": 'answers are text, send ["text"] or leave it out',
    "conversation": "send the earlier turns in `input`, or name the last response in `previous_response_id`",
}
_LENGTHS = ("max_completion_tokens", "max_output_tokens", "max_tokens")  # the name depends on the endpoint


def with_defaults(body: BodyT, spec: EngineSpec) -> BodyT:
    """Return a Generation with its null fields set to the model's sampling defaults, and with the engine's options for
    logprobs and usage applied; return other bodies unchanged."""
    if not isinstance(body, Generation):
        return body
    defaults: dict[str, Any] = dict(spec.default_sampling_params)
    lengths = [name for name in _LENGTHS if name in body.__struct_fields__]
    longest = defaults.pop("max_tokens", None)
    if all(getattr(body, name) is None for name in lengths):
        defaults[lengths[0]] = longest
    if spec.config.return_tokens_as_token_ids:
        defaults["return_tokens_as_token_ids"] = True
    given = {name: value for name, value in defaults.items() if getattr(body, name) is None}
    if spec.config.enable_force_include_usage and body.stream:
        given["stream_options"] = StreamOptions(include_usage=True, continuous_usage_stats=True)
    return msgspec.structs.replace(body, **given) if given else body


def sampling_params(body: Generation, **more: object) -> SamplingParams:
    """Return a request's parameters. RequestError if fields are invalid, not served, or contradict each other. `more`:
    values that replace those of `body`."""
    refuse_unserved(body)
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not served in a stream: leave it out or set stream to false")
    if body.logprob_token_ids:
        if more.get("logprobs") is None:
            raise RequestError("logprob_token_ids needs logprobs: ask for them too")
        more["logprobs"] = None  # the logprobs of these tokens replace those of the likeliest
    more["extra_args"] = body.vllm_xargs
    more["best_of"] = body.best_of or None  # 0, which OpenAI accepts: as many answers as are returned
    if more.get("structured_outputs") is None:
        more["structured_outputs"] = structured_outputs(body)
    return given_params(body, **more)


def refuse_unserved(body: Body) -> None:
    """Raise RequestError if a field of NOT_SERVED has a value with an effect."""
    for name, harmless in body.NOT_SERVED.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise RequestError(f"{name} is not served by this engine: {_INSTEAD.get(name, 'leave it out')}")


def given_params(body: Scheduled, **more: object) -> SamplingParams:
    """Return SamplingParams from the body's fields of the same names; values in `more` replace them, None means the
    default. RequestError if a value is invalid."""
    given = {name: getattr(body, name, None) for name in SamplingParams.__struct_fields__}
    given["prompt_cache_key"] = given["prompt_cache_key"] or getattr(body, "session_id", None)
    given |= {"service_tier": body.served_tier} | more
    return SamplingParams.from_optional(**{name: value for name, value in given.items() if value is not None})


def structured_outputs(body: Generation) -> StructuredOutputsParams | None:
    """Return the constraint that the body asks for, in any of its fields; None if there is none. RequestError if it is
    invalid, or fields ask for different constraints."""
    given = list(_constraints(body))
    distinct = [each for place, each in enumerate(given) if each[1:] not in [other[1:] for other in given[:place]]]
    if len(distinct) > 1:
        names = ", ".join(field for field, *_ in distinct)
        raise RequestError(f"structured_outputs is asked for in {len(distinct)} ways ({names}): give one")
    if not distinct:
        return None
    field, kind, value = distinct[0]
    style = {name: (body.structured_outputs or {}).get(name) for name in _STYLE}
    with errors_about(_shown_field(field)):
        return StructuredOutputsParams.of(
            {kind: value} | {name: each for name, each in style.items() if each is not None}
        )


def _constraints(body: Generation) -> Iterator[tuple[str, str, object]]:
    """Yield (field, kind, value) for each constraint in the body."""
    for name, value in (body.structured_outputs or {}).items():
        if name not in _STYLE:
            yield f"structured_outputs.{name}", name, value
    fields = [*((f"guided_{kind}", kind) for kind in _GUIDED), ("json_schema", "json"), ("grammar", "grammar")]
    for field, kind in fields:
        if (value := getattr(body, field)) is not None:
            yield field, kind, value
    if body.response_format is not None:
        yield from body.response_format.constraints()


def constraint_field(body: Generation) -> str:
    """Return the name, for errors, of the field that constrains a request's answers; structured_outputs if there is
    none."""
    return _shown_field(next((field for field, *_ in _constraints(body)), ""))


def _shown_field(field: str) -> str:
    """Return the name of a constraint's field for `errors_about`; structured_outputs if errors need no other name."""
    return "structured_outputs" if not field or field.startswith("structured_outputs.") else field


def schema_errors_about(field: str) -> contextlib.AbstractContextManager[None]:
    """Replace the name of response_format's schema, in RequestErrors, by `field`: the field of the original body from
    which the response_format was made."""
    return errors_about(field, re.escape(_SCHEMA))


@contextlib.contextmanager
def errors_about(field: str, begin: str = r"structured_outputs\.\w+") -> Iterator[None]:
    """Replace the start of each RequestError that matches the regex `begin`, a parameter's name, by `field`. With the
    `field` structured_outputs, errors stay as they are."""
    try:
        yield
    except RequestError as error:
        if field == "structured_outputs":
            raise
        raise RequestError(re.sub(f"^{begin}", lambda _: field, str(error), count=1)) from None


@contextlib.contextmanager
def prompt_errors_about(field: str) -> Iterator[None]:
    """Put `field`, the name of the field with the prompt, at the start of each RequestError about the prompt or its
    media."""
    with (
        errors_about(f"{field}: ", r"(?=(?:the|a) (?:prompts?|image|audio clip)\b)"),
        errors_about(field, r"prompt_token_ids\b"),
    ):
        yield


def chat_max_tokens(body: ChatRequest) -> int | None:
    """Return max_completion_tokens or else max_tokens, the limit of new tokens; None if neither is given. RequestError
    if the limit is out of range."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    most: int | None = getattr(body, name)
    if most is not None:
        LENGTH.check(name, most)
    return most
