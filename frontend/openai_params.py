"""From a request's fields to SamplingParams. What the engine has no parameter for is refused by name, not swallowed.

A field reaches the engine if SamplingParams has one of its name; a value that asks for nothing (a penalty of 0, n = 1)
is left out, so that a client which always sends it is served by any engine.
"""

from __future__ import annotations

import msgspec

from ..ipc.errors import RequestError
from ..ipc.sampling_params import SamplingParams
from .openai_schema import ChatRequest, Generation

_OURS = frozenset(SamplingParams.__struct_fields__)

_NOTHING_ASKED: dict[str, tuple[object, ...]] = {  # values that mean the same as leaving the field out
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (-1,),
    "modalities": (["text"],),
}

_HANDLED = frozenset(  # by the HTTP layer; OpenAI's bookkeeping fields change nothing here
    "model stream stream_options n user response_format request_id return_token_ids prompt echo add_special_tokens "
    "messages max_tokens max_completion_tokens logprobs top_logprobs tools tool_choice parallel_tool_calls "
    "reasoning_effort metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "verbosity add_generation_prompt chat_template_kwargs include_reasoning structured_outputs guided_json "
    "guided_regex guided_choice guided_grammar logit_bias".split()
)

MAX_CHOICES = 128


def sampling_params(body: Generation, **more: object) -> SamplingParams:
    """The parameters that `body` asks for; `more`, which wins, is what the endpoint has worked out itself."""
    values: dict[str, object] = {}
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if value is None or name in _HANDLED or value in _NOTHING_ASKED.get(name, ()):
            continue
        if name not in _OURS:
            raise RequestError(f"{name} is not served by this engine: leave it out")
        values[name] = value
    for name, value in more.items():
        if value is None:
            continue
        if name not in _OURS:
            raise RequestError(f"{name} is not served by this engine: leave it out")
        values[name] = value
    try:
        return SamplingParams(**values)  # type: ignore[arg-type]  # decoded by the schema, checked by the struct
    except TypeError as error:
        raise RequestError(str(error)) from None


def num_choices(body: Generation) -> int:
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_CHOICES:
        raise RequestError(f"n must be in [1, {MAX_CHOICES}], got {n}")
    return n


def logit_bias(body: Generation) -> dict[int, float] | None:
    """OpenAI writes the token ids as JSON keys."""
    if not body.logit_bias:
        return None
    try:
        return {int(token_id): bias for token_id, bias in body.logit_bias.items()}
    except ValueError:
        bad = next(key for key in body.logit_bias if not key.strip().isdecimal())
        raise RequestError(f"logit_bias has the key {bad!r:.80}: keys are token ids") from None


def structured(body: Generation) -> dict[str, object]:
    """What the answer must conform to, as {name of the constraint: its value}; empty if free."""
    found: dict[str, object] = dict(body.structured_outputs or {})
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if getattr(body, name) is not None:
            found[name.removeprefix("guided_")] = getattr(body, name)
    form = body.response_format
    if form is not None and form.type == "json_object":
        found["json_object"] = True
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema is None:
            raise RequestError("response_format needs json_schema.schema when its type is json_schema")
        found["json"] = form.json_schema.schema
    if len(found) > 1:
        raise RequestError(f"structured_outputs is asked for in {len(found)} ways ({', '.join(found)}): give one")
    return found


def chat_max_tokens(body: ChatRequest) -> int | None:
    """The newer name wins; OpenAI counts reasoning too, as we do."""
    return body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens


def is_given(value: object) -> bool:
    return value is not None and value is not msgspec.UNSET
