"""Format errors for OpenAI's clients: a status and {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
import math
import re
from typing import Annotated

import msgspec
from starlette.responses import Response

from ....ipc.errors import EngineDead, Overloaded, RateLimited, RequestError, StorageFull, TokenloomError, error_info
from ..field import means
from ..prompt_limits import TOO_LONG

logger = logging.getLogger("tokenloom.http")

_REFUSAL_BY_STATUS = {404: "model", 413: "size"}
_LEADING_NAME = re.compile(
    r"([a-z_]+)(?:[.\[][\w.\[\]]*)?(?::| (?:is|must|has|holds|cannot|needs|allows|forces|names)\b)"
)


class ErrorDetail(msgspec.Struct, frozen=True):
    """What happened, and what to do about it."""

    message: Annotated[str, means("What happened, with the numbers, and what to do.")]
    type: Annotated[str, means("Kind of the error, such as invalid_request_error.")]
    param: Annotated[str | None, means("Path of the field that it is about; null: none.")]
    code: Annotated[str | None, means("A name for programs, such as context_length_exceeded; null: none.")]


class ErrorBody(msgspec.Struct, frozen=True):
    """Answer to a request that failed, in OpenAI's form."""

    error: Annotated[ErrorDetail, means("The error.")]


class HttpError(Exception):
    """Error with an HTTP status and OpenAI's body."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(ErrorDetail(message, kind, param, code))
        self.headers = headers or {}


_encoder = msgspec.json.Encoder()
encode_json = _encoder.encode


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(body), status, headers, "application/json")


def unknown_model(error: TokenloomError) -> HttpError:
    return HttpError(404, str(error), param="model", code="model_not_found")


def to_http_error(error: BaseException) -> HttpError:
    """Return the HTTP error for an error. For an unexpected exception it has status 500 and names the type."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if TOO_LONG in str(error) else None
        return HttpError(400, str(error), param=_param(str(error)), code=code)
    if isinstance(error, StorageFull):
        return HttpError(507, str(error), "server_error", code="storage_full")
    if isinstance(error, Overloaded):
        retry = {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
        if isinstance(error, RateLimited):
            return HttpError(429, str(error), "rate_limit_error", code="rate_limit_exceeded", headers=retry)
        return HttpError(503, str(error), "overloaded_error", code="overloaded", headers=retry)
    if isinstance(error, EngineDead):
        return HttpError(503, str(error), "server_error", code="engine_unavailable", headers={"retry-after": "1"})
    if isinstance(error, TokenloomError):
        return HttpError(500, str(error), "server_error")
    return HttpError(500, f"{type(error).__name__}: {error}", "server_error")


def stream_error(error: Exception) -> HttpError:
    """Return the HTTP error for an error in a stream that has begun; log an unexpected exception."""
    answer = to_http_error(error)
    if answer.status == 500 and not isinstance(error, TokenloomError):
        logger.error("a stream failed", exc_info=error)
    return answer


def refusal_kind(error: HttpError | TokenloomError) -> str:
    """Return the metrics' label for a request that was refused before it reached the engine."""
    return _REFUSAL_BY_STATUS.get(error.status, "body") if isinstance(error, HttpError) else error_info(error).kind


def _param(message: str) -> str | None:
    found = _LEADING_NAME.match(message)
    return found.group(1) if found else None
