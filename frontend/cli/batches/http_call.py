"""One HTTP request of a batch, with its whole answer. Knows no lines."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Generator, Iterator
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable
from urllib.parse import urlsplit

import msgspec

from ..http_engine import message_of, new_connection

ANSWER_TIMEOUT_S = 3600.0
NO_BODY = b"null"  # of a response without JSON


@runtime_checkable
class SizedBody(Protocol):
    """A body that is sent piece by piece."""

    @property
    def num_bytes(self) -> int: ...

    def __iter__(self) -> Iterator[bytes]: ...


Body: TypeAlias = bytes | SizedBody | None


class HttpResponse(NamedTuple):
    """Response to one HTTP request; status 0: no whole response."""

    status: int
    body: bytes = NO_BODY  # JSON in one line
    reason: str = ""  # of an error
    request_id: str = ""
    retry_after_s: float = 0.0


def call(
    method: str, url: str, path: str, body: Body, api_key: str | None, content_type: str = "application/json"
) -> HttpResponse:
    """Send one HTTP request. The result has the reason if the response is not a 200 with JSON."""
    try:
        with opened(method, url, path, body, api_key, content_type) as response:
            data = response.read()
    except (OSError, http.client.HTTPException) as error:
        return HttpResponse(0, reason=f"{url} does not answer: {error}")
    retry_after = response.headers.get("retry-after", "")
    answer = HttpResponse(
        response.status,
        request_id=response.headers.get("x-request-id", ""),
        retry_after_s=float(retry_after) if retry_after.isdecimal() else 0.0,
    )
    try:
        value = msgspec.json.decode(data or NO_BODY)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        kind_of_body = response.headers.get("content-type", "no type")
        return answer._replace(reason=f"status {response.status} with {kind_of_body:.80}, which is not JSON: {error}")
    reason = "" if response.status == 200 else f"status {response.status}: {_message(value)}"
    return answer._replace(body=b" ".join((data or NO_BODY).splitlines()), reason=reason)


@contextlib.contextmanager
def opened(
    method: str, url: str, path: str, body: Body, api_key: str | None, content_type: str = "application/json"
) -> Generator[http.client.HTTPResponse, None, None]:
    """Send one HTTP request; the context's value is the response before its body. OSError or HTTPException
    without one."""
    parts = urlsplit(url)
    connection = new_connection(parts, ANSWER_TIMEOUT_S)
    headers = {"content-type": content_type}
    if isinstance(body, SizedBody):
        headers["content-length"] = str(body.num_bytes)
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    try:
        connection.request(method, parts.path.rstrip("/") + path, body, headers)
        yield connection.getresponse()
    finally:
        connection.close()


def _message(value: object) -> str:
    """Return the message of an OpenAI error object, or `value` as text."""
    message = message_of(value)
    return str(value) if message is None else message
