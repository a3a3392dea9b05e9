"""Convert the fields of a request to SamplingParams. A field that the engine does not support is refused by name.

OpenAI's bookkeeping fields (user, metadata, store …) are accepted and have no effect.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from ....ipc.errors import RequestError
from ....ipc.sampling_params import LENGTH, SamplingParams
from ....ipc.structured_outputs import StructuredOutputsParams
from .schema import Body, ChatRequest, Generation, Scheduled


def sampling_params(body: Generation, **more: object) -> SamplingParams:
    """Return the parameters of a request. `more`: values that the endpoint derives; they replace those of `body`."""
    refuse_unserved(body)
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not served in a stream: leave it out or set stream to false")
    num_answers = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != num_answers:
        raise RequestError(f"best_of is {body.best_of} and n is {num_answers}: ask for n answers and choose yourself")
    if body.logprob_token_ids:
        if more.get("logprobs") is None:
            raise RequestError("logprob_token_ids needs logprobs: ask for them too")
        more["logprobs"] = None  # the logprobs of these tokens replace those of the likeliest
    more["extra_args"] = body.vllm_xargs
    if more.get("structured_outputs") is None:
        more["structured_outputs"] = structured_outputs(body)
    return given_params(body, logit_bias=_logit_bias(body), **more)


def refuse_unserved(body: Body) -> None:
    """Raise RequestError for the first field that asks for a feature in NOT_SERVED."""
    if getattr(body, "stream_options", None) is not None and not getattr(body, "stream", None):
        raise RequestError("stream_options needs stream to be true: leave it out or stream the answer")
    for name, harmless in body.NOT_SERVED.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise RequestError(f"{name} is not served by this engine: leave it out")


def given_params(body: Scheduled, **more: object) -> SamplingParams:
    """Return SamplingParams from the body's fields of the same names. `more` replaces them; None: default."""
    given = {name: getattr(body, name, None) for name in SamplingParams.__struct_fields__} | more
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except TypeError as error:
        raise RequestError(str(error)) from None


def _logit_bias(body: Generation) -> dict[int, float] | None:
    """Convert the keys, token ids as text, to integers."""
    if not body.logit_bias:
        return None
    try:
        return {int(token_id): bias for token_id, bias in body.logit_bias.items()}
    except ValueError:
        bad = [key for key in body.logit_bias if not key.strip().isdecimal()]
        raise RequestError(f"logit_bias has the keys {', '.join(map(repr, bad))!s:.400}: keys are token ids") from None


def structured_outputs(body: Generation) -> StructuredOutputsParams | None:
    """Return the constraint on the answer, from any of its fields; None without one."""
    found: dict[str, object] = dict(body.structured_outputs or {})  # by name of the constraint
    style = {name: found.pop(name) for name in ("disable_any_whitespace",) if name in found}
    field = "structured_outputs"
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{name}")) is not None:
            found[name] = value
            field = f"guided_{name}"
    form = body.response_format
    if form is not None and form.type == "json_object":
        found["json_object"] = True
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema is None:
            raise RequestError("response_format needs json_schema.schema when its type is json_schema")
        found["json"] = form.json_schema.schema
        field = "response_format.json_schema.schema"
    if len(found) > 1:
        raise RequestError(f"structured_outputs is asked for in {len(found)} ways ({', '.join(found)}): give one")
    if not found:
        return None
    with errors_about(field):
        return StructuredOutputsParams.of(found | style)


@contextlib.contextmanager
def errors_about(field: str, begin: str = r"structured_outputs\.\w+") -> Iterator[None]:
    """Name `field` in a RequestError in place of the parameter's name, the regex `begin`, with which it begins."""
    try:
        yield
    except RequestError as error:
        if field == "structured_outputs":
            raise
        raise RequestError(re.sub(f"^{begin}", lambda _: field, str(error), count=1)) from None


@contextlib.contextmanager
def prompt_errors_about(field: str) -> Iterator[None]:
    """Begin each RequestError about the prompt with `field`, the field that holds the prompt."""
    with (
        errors_about(f"{field}: ", r"(?=(?:the|a) prompts?\b)"),
        errors_about(field, r"prompt_token_ids\b"),
    ):
        yield


def chat_max_tokens(body: ChatRequest) -> int | None:
    """Return the limit of new tokens, reasoning included; max_completion_tokens takes precedence over max_tokens."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    if (most := getattr(body, name)) is not None:
        LENGTH.check(name, most)
    return int(most) if most is not None else None
