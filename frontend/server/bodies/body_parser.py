"""Decode HTTP bodies and check them as far as possible without the model.

The frontend's loop decodes small bodies, the intake process large ones, with this code, so that errors are the same.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from ....ipc.errors import RequestError
from ....ipc.messages.intake import BodyInput
from ...forms.ollama.request_body import OllamaEmbeddingsRequest, OllamaEmbedRequest, OllamaGenerateRequest
from ...forms.openai.embedding_body import CohereEmbedRequest, GenerativeScoringRequest, PooledInput
from ...forms.openai.generation import Body
from ...forms.openai.params import prompt_errors_about
from ...forms.openai.prompts import body_inputs
from ...forms.openai.schema import CompletionRequest, DetokenizeRequest, TokenizeRequest
from ...forms.pooling.pooling_body import ScoreRequest
from ...forms.pooling.rerank_body import RerankRequest
from ...forms.pooling.tei_body import TeiEmbedRequest
from ...forms.prompt_limits import PromptLimits
from ...forms.prompts import check_text, check_token_ids
from .body_error import BodyError, invalid_body
from .unknown_fields import without_unknown

BodyT = TypeVar("BodyT", bound=msgspec.Struct)

SMALL_BYTES = 128 << 10  # the loop decodes bodies up to this size: at worst 16 ms, for a list of lists of one token

OTHER_FORMATS = frozenset(  # unknown fields that ask for a form of the answer: to ignore one would give another answer
    (
        *("responseSchema", "response_schema", "responseJsonSchema", "response_json_schema", "output_schema"),
        *("guided_decoding", "structural_tag", "regex", "ebnf", "format"),
    )
)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)


class ParsedBody(NamedTuple, Generic[BodyT]):
    """Decoded body. `inputs`: its prompts, the tokens to detokenize, or a form's files; a chat has one if an intake
    process tokenized it, otherwise only the messages in `body`."""

    body: BodyT
    inputs: list[BodyInput]
    ignored: Sequence[str] = ()  # unknown fields, in the form of `without_unknown`
    raw: bytes = b""  # the undecoded body, for /v1/responses only


def parse_body(
    raw: bytes | bytearray, body_type: type[BodyT], limits: PromptLimits, *, is_strict: bool = False
) -> ParsedBody[BodyT]:
    """Decode and check a body. BodyError if it does not match the schema, RequestError for a bad value; both name the
    field, if there is one. Unknown fields, and items that have no meaning here, are refused if `is_strict` or if the
    type is not a Body but a control command, and always for the names of OTHER_FORMATS; otherwise they are dropped, and
    the first MAX_NAMED of them are named in the result."""
    if raw.startswith(BOM_UTF8):  # RFC 8259, 8.1: a reader may ignore it
        raw = raw[len(BOM_UTF8) :]
    try:
        return _parse(raw, body_type, limits)
    except BodyError:
        if is_strict or not issubclass(body_type, Body):
            raise
        try:
            known, ignored = without_unknown(raw, body_type)
        except _UNREADABLE as broken:  # a syntax error after the unknown field
            raise invalid_body(broken, raw) from None
        if not ignored:
            raise
        parsed = _parse(known, body_type, limits)
        for name in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]):
            if name in OTHER_FORMATS and name not in body_type.__struct_encode_fields__:
                raise BodyError(
                    f"{name} is another server's name of response_format: give the schema, or the like, there",
                    param=name,
                ) from None
        return ParsedBody(parsed.body, parsed.inputs, ignored)


def _parse(raw: bytes | bytearray, body_type: type[BodyT], limits: PromptLimits) -> ParsedBody[BodyT]:
    try:
        body = msgspec.json.decode(raw, type=body_type)
    except _UNREADABLE as error:
        if isinstance(error.__cause__, RequestError):
            raise error.__cause__ from None
        raise invalid_body(error, raw) from None
    return ParsedBody(body, list(_inputs(body, limits)))


def _inputs(body: msgspec.Struct, limits: PromptLimits) -> Iterator[BodyInput]:
    if isinstance(body, CompletionRequest):
        yield from body_inputs("prompt", body.prompt, limits, body.n)
    elif isinstance(body, PooledInput):
        _check_one("input", body.input, body.messages)
        if body.input is not None:
            yield from body_inputs("input", body.input, limits)
    elif isinstance(body, ScoreRequest | RerankRequest):
        with prompt_errors_about(body.seconds_field):
            yield from body_inputs(body.seconds_field, [*body.seconds], limits)
    elif isinstance(body, TeiEmbedRequest):
        yield from body_inputs("inputs", body.inputs, limits)
    elif isinstance(body, CohereEmbedRequest):
        yield from body_inputs("texts", [*body.texts], limits)
    elif isinstance(body, GenerativeScoringRequest):
        yield from body_inputs("query", body.query if isinstance(body.query, str) else [*body.query], limits)
        yield from body_inputs("items", [*body.items], limits)
    elif isinstance(body, TokenizeRequest):
        _check_one("prompt", body.prompt, body.messages)
        if body.prompt is not None:
            yield BodyInput(text=check_text(body.prompt))
    elif isinstance(body, OllamaGenerateRequest) and body.raw:
        yield from body_inputs("prompt", body.prompt, limits)
    elif isinstance(body, OllamaEmbedRequest) and body.texts:
        yield from body_inputs("input", [*body.texts], limits)
    elif isinstance(body, OllamaEmbeddingsRequest):
        yield from body_inputs("prompt", body.prompt, limits)
    elif isinstance(body, DetokenizeRequest) and body.tokens:
        yield BodyInput(token_ids=check_token_ids(body.tokens))


def _check_one(field: str, given: object, messages: object) -> None:
    if (given is None) == (messages is None):
        raise RequestError(f"{field} must be given, or messages in its place: give exactly one")
