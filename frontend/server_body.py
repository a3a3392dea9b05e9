"""A request's body, decoded by its schema; and the one check that all bodies share."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request

from ..ipc.errors import RequestError
from .openai_errors import HttpError, invalid_body

BodyT = TypeVar("BodyT")


async def read_body(request: Request, body_type: type[BodyT]) -> BodyT:
    """The decoded body; HttpError for one that is not of the schema, RequestError for a value that cannot be, both of
    which name the field."""
    raw = await request.body()
    if not raw:
        raise HttpError(400, "the body is empty: send a JSON object")
    try:
        return msgspec.json.decode(raw, type=body_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        if isinstance(error.__cause__, RequestError):
            raise error.__cause__ from None
        raise invalid_body(error) from None


def check_model(asked: str | None, served: str) -> None:
    """404 for a model that is not the one which is served."""
    if asked is not None and asked != served:
        message = f"the model {asked!r:.200} is not served here: this engine serves {served}"
        raise HttpError(404, message, param="model", code="model_not_found")
