"""The bodies of HTTP requests, decoded and checked as far as that needs no model.

The frontend's loop does it for small ones, the intake process for large ones, so that an error has the same words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from ...ipc.errors import RequestError
from ...ipc.messages.intake import BodyInput
from ..client.prompts import check_text, check_token_ids
from ..openai.forms.cohere_body import CohereEmbedRequest
from ..openai.forms.prompts import body_inputs
from ..openai.forms.schema import Body, CompletionRequest, DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from ..openai.forms.scoring_body import GenerativeScoringRequest
from ..text.prompt_limits import PromptLimits
from .body_error import UNKNOWN_FIELD, BodyError, invalid_body
from .unknown_fields import without_unknown

BodyT = TypeVar("BodyT", bound=msgspec.Struct)

SMALL_BYTES = 128 << 10  # of a body that the loop decodes: 16 ms for the worst of them, a list of lists of one token


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)


class ParsedBody(NamedTuple, Generic[BodyT]):
    """A body and its prompts, or the tokens to detokenize; none for a chat whose messages are in `body`."""

    body: BodyT
    inputs: list[BodyInput]
    ignored: Sequence[str] = ()  # fields that are unknown, as `without_unknown` names them
    raw: bytes = b""  # as it came, of a response


def parse_body(
    raw: bytes | bytearray, body_type: type[BodyT], limits: PromptLimits, *, is_strict: bool = False
) -> ParsedBody[BodyT]:
    """BodyError for what is not of the schema, RequestError for a value that cannot be; both name the field. Unknown
    fields are refused if `is_strict`, and in an order, else left out."""
    try:
        return _parse(raw, body_type, limits)
    except BodyError as error:
        if is_strict or error.code != UNKNOWN_FIELD or not issubclass(body_type, Body):
            raise
        try:
            known, ignored = without_unknown(raw, body_type)
        except _UNREADABLE as broken:  # behind the unknown field
            raise invalid_body(broken, raw) from None
        parsed = _parse(known, body_type, limits)
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
    elif isinstance(body, EmbeddingRequest):
        _check_one("input", body.input, body.messages)
        if body.input is not None:
            yield from body_inputs("input", body.input, limits)
    elif isinstance(body, CohereEmbedRequest):
        yield from body_inputs("texts", list[str | int | list[int]](body.texts), limits)
    elif isinstance(body, GenerativeScoringRequest):
        yield from body_inputs("query", body.query if isinstance(body.query, str) else [*body.query], limits)
        yield from body_inputs("items", list[str | int | list[int]](body.items), limits)
    elif isinstance(body, TokenizeRequest):
        _check_one("prompt", body.prompt, body.messages)
        if body.prompt is not None:
            yield BodyInput(text=check_text(body.prompt))
    elif isinstance(body, DetokenizeRequest) and body.tokens:
        yield BodyInput(token_ids=check_token_ids(body.tokens))


def _check_one(field: str, given: object, messages: object) -> None:
    if (given is None) == (messages is None):
        raise RequestError(f"{field} must be given, or messages in its place: give exactly one")
