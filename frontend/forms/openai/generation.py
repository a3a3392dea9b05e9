"""Bodies of OpenAI's API that generate: the fields that all of them have, and the types of fields.

A null field counts as absent. `params.py` converts fields to SamplingParams and refuses fields that the engine does not
support.

The ranges in the types are only for /openapi.json (`http/openapi.py`); decoding ignores them. SamplingParams, endpoints
and input processor check the values, since their errors name a remedy. schemathesis compares schema and checks in both
directions (`tests/system/test_http_tools.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ....ipc.params.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGITS_PROCESSORS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_SALT_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    ServiceTier,
)
from ..field import means, ours, unused

TOKEN_ID = "token id"  # title of integers below the vocabulary size of the loaded model


def within(low: float, high: float) -> Meta:
    return Meta(extra_json_schema={"minimum": low, "maximum": high})


def items(least: int = 0, most: int | None = None) -> Meta:
    return Meta(extra_json_schema={"minItems": least} | ({} if most is None else {"maxItems": most}))


def matching(pattern: str) -> Meta:
    return Meta(extra_json_schema={"pattern": pattern})


MAX_PROMPTS = 2048  # per request; OpenAI's limit
MAX_ID_CHARACTERS = 200
MOST = 2**31 - 1
Natural: TypeAlias = Annotated[int, within(0, MOST)]
TokenId: TypeAlias = Annotated[int, within(0, MOST), Meta(title=TOKEN_ID)]
Length: TypeAlias = Annotated[int, within(1, MOST)]  # of an answer; 0, only to score the prompt, is not served
Truncation: TypeAlias = Annotated[
    int, Meta(extra_json_schema={"anyOf": [{"const": -1}, {"minimum": 1, "maximum": MOST}]})
]
Text: TypeAlias = Annotated[str, Meta(extra_json_schema={"minLength": 1})]
Word: TypeAlias = Annotated[str, matching(r"\S")]
RequestId: TypeAlias = Annotated[str, matching(rf"^[ -.0-~]{{1,{MAX_ID_CHARACTERS}}}$")]
Salt: TypeAlias = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": MAX_SALT_CHARACTERS})]
Bias: TypeAlias = dict[Annotated[str, matching("^[0-9]+$")], Annotated[float, within(-100, 100)]]

_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MOST, "title": TOKEN_ID}}
_PROMPTS = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"anyOf": [{"type": "string"}, _IDS]}}
_FORMS = [{"type": "string"}, _IDS, _PROMPTS]
Prompts: TypeAlias = Annotated[  # one prompt as text or ids, or a list of prompts
    str | list[str | int | list[int]], Meta(extra_json_schema={"allOf": [{"anyOf": _FORMS}]})
]


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all bodies. Without --strict-fields, unknown fields are removed before decoding, with a warning."""

    NOT_SERVED: ClassVar[dict[str, tuple[object, ...]]] = {}  # unsupported fields, and the values that make them no-ops
    EXAMPLE: ClassVar[JsonObject] = {}  # a body that any model answers, for /openapi.json


class StreamOptions(Body, frozen=True, kw_only=True):
    """What a stream says beside the text."""

    include_usage: Annotated[bool | None, means("Send the token counts in a last chunk.", False)] = None
    continuous_usage_stats: Annotated[bool | None, ours("Send the token counts in every chunk.", False)] = None
    include_obfuscation: Annotated[
        bool | None, unused("OpenAI pads its chunks against traffic analysis; none are padded here.")
    ] = None


class JsonSchemaFormat(Body, frozen=True, kw_only=True):
    name: Annotated[str, means("Name of the schema, which only the caller reads.")] = "schema"
    description: Annotated[str | None, unused("What the answer is for.")] = None
    schema: Annotated[JsonObject | None, means("The JSON schema that the answer satisfies.", "any JSON object")] = None
    strict: Annotated[bool | None, unused("Answers always satisfy the schema.")] = None


_SCHEMAS = ("json_schema", "schema", "value")
_CONSTRAINTS: dict[str, tuple[str, ...]] = {  # fields of a ResponseFormat by its type
    "text": (),
    **dict.fromkeys(("json_object", "json_schema", "json"), _SCHEMAS),
    **{name: ("value", field) for name, field in (("regex", "pattern"), ("grammar", "grammar"))},
}


class ResponseFormat(Body, frozen=True, kw_only=True):
    """Form of an answer, in the spellings of OpenAI, TGI (`value`), llama.cpp, Together and Fireworks (`schema`,
    `pattern`, `grammar`) and Cohere (a schema directly in `json_schema`)."""

    type: Annotated[
        Literal["text", "json_object", "json_schema", "json", "regex", "grammar"],
        means("What the answer is: free text, a JSON object, JSON of a schema, a match of a regex, or of a grammar."),
    ]
    json_schema: Annotated[
        JsonObject | None, means("An object with name and schema, or the schema itself; for the type json_schema.")
    ] = None
    schema: Annotated[JsonObject | None, ours("The schema, in the place where llama.cpp has it.")] = None
    value: Annotated[JsonObject | str | None, ours("The schema, regex or grammar, where TGI has it.")] = None
    pattern: Annotated[str | None, ours("The regex that the whole answer matches, for the type regex.")] = None
    grammar: Annotated[str | None, ours("The grammar in Lark or GBNF, for the type grammar.")] = None
    name: Annotated[str | None, unused("Name of the schema.")] = None
    description: Annotated[str | None, unused("What the answer is for.")] = None
    strict: Annotated[bool | None, unused("Answers always satisfy the schema.")] = None

    def constraints(self) -> Iterator[tuple[str, str, object]]:
        """Yield (field, kind, value) for each constraint, with the kinds of StructuredOutputsParams.

        RequestError if the type does not use a given field, or lacks the field that it needs."""
        kind, is_free = self.type if self.type in ("regex", "grammar") else "json", True
        for name in ("json_schema", "schema", "value", "pattern", "grammar"):
            value = getattr(self, name)
            if value is None:
                continue
            if name not in _CONSTRAINTS[self.type]:
                raise RequestError(
                    f"response_format.{name} has no effect with the type {self.type}: leave it out, or give its type"
                )
            if name == "json_schema" and value.keys() <= {"name", "description", "schema", "strict"}:
                name, value = "json_schema.schema", value.get("schema")
            if value is not None:
                is_free = False
                yield f"response_format.{name}", kind, value
        if is_free and self.type == "json_object":
            yield "response_format", "json_object", True
        elif is_free and self.type != "text":
            name = {"json_schema": "json_schema.schema"}.get(self.type, _CONSTRAINTS[self.type][-1])
            raise RequestError(f"response_format.{name} is missing, which the type {self.type} needs: give it")


class Scheduled(Body, frozen=True, kw_only=True):
    """Base with the fields that most endpoints share: for model, truncation, scheduling and caching."""

    model: Annotated[
        str | None, means("A served name or a loaded LoRA adapter, as /v1/models lists them.", "the served model")
    ] = None
    user: Annotated[str | None, unused("The end user, for the caller's own records.")] = None
    truncate_prompt_tokens: Annotated[
        Truncation | None,
        ours("Cut a longer prompt to this many tokens; -1: to what fits.", "a prompt that is too long is refused"),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None, ours("The side of the prompt that is cut; left keeps its last tokens.", "left")
    ] = None
    priority: Annotated[
        int | None, ours("Lower values run first, if the engine has --scheduling-policy priority.", 0)
    ] = None
    service_tier: Annotated[
        str | None,
        means("With flex it computes only in what other requests leave, for work that nobody waits for.", "default"),
    ] = None
    timeout_s: Annotated[
        float | None,
        ours("Seconds after which the answer ends with finish_reason timeout and what it has.", "no limit"),
    ] = None
    queue_timeout_s: Annotated[
        float | None, ours("Seconds in the queue after which the request ends with timeout.", "no limit")
    ] = None
    cache_salt: Annotated[
        Salt | None, ours("Only requests with the same salt share cached prefixes.", "shared with all without one")
    ] = None
    request_id: Annotated[
        RequestId | None, ours("The caller's own id, which becomes part of the answer's id.", "a random one")
    ] = None

    @property
    def served_tier(self) -> ServiceTier | None:
        """The tier in which the request is served; None if it names none."""
        if self.service_tier is None:
            return None
        return "flex" if self.service_tier == "flex" else "default"


class Generation(Scheduled, frozen=True, kw_only=True):
    """Fields of completions, chats and responses."""

    NOT_SERVED = {"use_beam_search": (False,), "length_penalty": (1,)}

    stream: Annotated[
        bool | None, means("Send the answer piece by piece, as server-sent events, while it is made.", False)
    ] = None
    stream_options: Annotated[StreamOptions | None, means("What a stream says beside the text.")] = None
    include_cache_report: Annotated[
        bool | None,
        ours("Say in the usage which tokens of the prompt were not found in the prefix cache, and why.", False),
    ] = None
    n: Annotated[int | None, means("Number of answers; each is drawn on its own.")] = None
    temperature: Annotated[
        float | None,
        means(
            "How freely tokens are drawn: 0 always takes the likeliest, above 1 unlikely ones gain. OpenAI: up to 2."
        ),
    ] = None
    top_p: Annotated[
        float | None, means("Draw only from the likeliest tokens whose probabilities first reach this sum.")
    ] = None
    seed: Annotated[
        int | None, means("Equal seeds draw equal tokens from equal prompts.", "a new one for each request")
    ] = None
    stop: Annotated[
        Text | Annotated[list[Text], items(0, MAX_STOP_STRINGS)] | None,
        means("A text, or several, at which the answer ends; the text itself is left out.", "none"),
    ] = None
    presence_penalty: Annotated[
        float | None, means("Subtracted from the logit of each token that the answer already has.")
    ] = None
    frequency_penalty: Annotated[
        float | None, means("The same, times the number of times that the answer has the token.")
    ] = None
    logit_bias: Annotated[
        Bias | None, means("Added to the logits of tokens: an object of token id and number.", "none")
    ] = None
    response_format: Annotated[
        ResponseFormat | None, means("The form that the answer must have, such as JSON of a schema.", "free text")
    ] = None
    # beyond OpenAI
    top_k: Annotated[int | None, ours("Draw only from this many of the likeliest tokens; 0 or -1: from all.")] = None
    min_p: Annotated[float | None, ours("Draw only tokens at least this likely, relative to the likeliest.")] = None
    repetition_penalty: Annotated[
        float | None, ours("Above 1, tokens that prompt or answer already have become less likely; 1: off.")
    ] = None
    min_tokens: Annotated[int | None, ours("The answer does not end before it has this many tokens.")] = None
    stop_token_ids: Annotated[
        Annotated[list[Natural], items(0, MAX_STOP_TOKEN_IDS)] | None,
        ours("Ids of further tokens at which the answer ends.", "none"),
    ] = None
    include_stop_str_in_output: Annotated[bool | None, ours("Leave the stop text in the answer.")] = None
    ignore_eos: Annotated[bool | None, ours("Go on behind the model's end token, up to the longest answer.")] = None
    skip_special_tokens: Annotated[bool | None, ours("Leave special tokens out of the text.")] = None
    spaces_between_special_tokens: Annotated[
        bool | None, ours("Put spaces between special tokens, where the tokenizer does.")
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        ours("Return the logprobs of the prompt's tokens, and of this many likeliest alternatives.", "not returned"),
    ] = None
    logprob_token_ids: Annotated[
        Annotated[list[TokenId], items(0, MAX_LOGPROB_TOKEN_IDS)] | None,
        ours("With logprobs: return those of these tokens in place of the likeliest.", "the likeliest"),
    ] = None
    thinking_token_budget: Annotated[
        int | None, ours("Tokens of reasoning after which its end is forced; -1: no limit.", "no limit")
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[TokenId], items(1)] | None, ours("Ids of the only tokens that may be drawn.", "all")
    ] = None
    bad_words: Annotated[
        Annotated[list[Word], items(0, MAX_BAD_WORDS)] | None, ours("Texts that the answer may not contain.", "none")
    ] = None
    logits_processors: Annotated[
        Annotated[list[Word], items(0, MAX_LOGITS_PROCESSORS)] | None,
        ours("Functions, as module:function, that change the logits; the operator names those allowed.", "none"),
    ] = None
    vllm_xargs: Annotated[JsonObject | None, ours("Arguments of the logits processors.", "none")] = None
    repetition_detection: Annotated[
        JsonObject | None,
        ours("End an answer that repeats itself: max_pattern_size, min_pattern_size and min_count.", "off"),
    ] = None
    return_token_ids: Annotated[bool | None, ours("Return the ids of the prompt and of the answer.", False)] = None
    return_tokens_as_token_ids: Annotated[bool | None, ours("Write tokens of logprobs as token_id:ID.", False)] = None
    structured_outputs: Annotated[
        JsonObject | None,
        ours("The form of the answer: one of json, regex, choice, grammar and json_object.", "free text"),
    ] = None
    guided_json: Annotated[JsonObject | str | None, ours("Older name of structured_outputs.json.")] = None
    guided_regex: Annotated[str | None, ours("Older name of structured_outputs.regex.")] = None
    guided_choice: Annotated[list[str] | None, ours("Older name of structured_outputs.choice.")] = None
    guided_grammar: Annotated[str | None, ours("Older name of structured_outputs.grammar.")] = None
    json_schema: Annotated[JsonObject | None, ours("llama.cpp's name of structured_outputs.json.")] = None
    grammar: Annotated[str | None, ours("llama.cpp's name of structured_outputs.grammar.")] = None
    best_of: Annotated[
        int | None, means("Answers from which the best n are returned. Only n itself is served, or 0.", "n")
    ] = None
    use_beam_search: Annotated[bool | None, ours("Beam search, which only the Python library has.", False)] = None
    length_penalty: Annotated[float | None, ours("Of beam search, which only the Python library has.", 1)] = None
