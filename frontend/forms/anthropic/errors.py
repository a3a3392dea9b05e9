"""Format errors for Anthropic's clients: a status and {"type": "error", "error": {type, message}}."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

import msgspec

from ..field import means
from ..openai.errors import HttpError

VERSION_HEADER = b"anthropic-version"  # sent only by Anthropic's clients
OVERLOADED = 529  # Anthropic's own status, which its clients retry
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_KINDS |= {429: "rate_limit_error", OVERLOADED: "overloaded_error"}


class MessageErrorDetail(msgspec.Struct, frozen=True):
    """What happened, and what to do about it."""

    type: Annotated[str, means("Kind of the error, such as invalid_request_error.")]
    message: Annotated[str, means("What happened, with the numbers, and what to do.")]


class MessageErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a request that failed, in Anthropic's form."""

    type: Annotated[Literal["error"], means("Always error.")] = "error"
    error: Annotated[MessageErrorDetail, means("The error.")]


def has_message_errors(path: str, headers: Collection[bytes] = ()) -> bool:
    """Return whether errors of this path have Anthropic's form: under /v1/messages always, under /v1/models for
    Anthropic's clients. `headers`: names of the request's headers."""
    is_of_models = f"{path}/".startswith("/v1/models/") and VERSION_HEADER in headers
    return is_of_models or f"{path}/".startswith("/v1/messages/")


def message_error(error: HttpError) -> tuple[MessageErrorBody, int]:
    """Return the body and the status of an error in Anthropic's form; 529 for an overload."""
    status = OVERLOADED if error.body.error.code == "overloaded" else error.status
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return MessageErrorBody(error=MessageErrorDetail(kind, str(error))), status
