"""Endpoint: a path of the HTTP server: how it answers and what /openapi.json says of it. And how a body is read.

Knows no field of any body (`openai_schema.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..ipc.errors import RequestError
from .openai_errors import HttpError, invalid_body

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class Endpoint(NamedTuple):
    """A GET, or a POST of a `body_type`."""

    path: str
    answer: Callable[[Request], Awaitable[Response]]
    summary: str = ""  # none: not listed in /openapi.json
    body_type: type[msgspec.Struct] | None = None
    media_type: str = "application/json"

    @property
    def may_stream(self) -> bool:
        return self.body_type is not None and "stream" in self.body_type.__struct_fields__

    @property
    def route(self) -> Route:
        return Route(self.path, self.answer, methods=["GET" if self.body_type is None else "POST"])


async def read_body(request: Request, body_type: type[BodyT], served: str = "") -> BodyT:
    """The decoded body; HttpError for one that is not of the schema, or that asks for another model than the one which
    is `served`, RequestError for a value that cannot be, all of which name the field."""
    coding = request.headers.get("content-encoding", "identity")
    if coding != "identity":
        raise HttpError(415, f"the body comes with content-encoding {coding:.40}: send it as it is")
    raw = await request.body()
    if not raw:
        raise HttpError(400, "the body is empty: send a JSON object")
    try:
        body = msgspec.json.decode(raw, type=body_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        if isinstance(error.__cause__, RequestError):
            raise error.__cause__ from None
        raise invalid_body(error) from None
    if served:
        check_model(getattr(body, "model", None), served)
    return body


def check_model(asked: str | None, served: str) -> None:
    """404 for a model that is not the one which is served."""
    if asked is not None and asked != served:
        message = f"the model {asked!r:.200} is not served here: this engine serves {served}"
        raise HttpError(404, message, param="model", code="model_not_found")
