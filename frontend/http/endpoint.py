"""Endpoint: a path of the HTTP server: how it answers and what /openapi.json says of it.

Knows no field of any body (`openai/forms/schema.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


class Endpoint(NamedTuple):
    """A GET, a POST of a `body_type`, or another method."""

    path: str
    answer: Callable[[Request], Awaitable[Response]]
    summary: str = ""  # none: not listed in /openapi.json
    body_type: type[msgspec.Struct] | None = None
    media_type: str = "application/json"
    needs_body: bool = True  # of a POST
    other_method: str = ""

    @property
    def may_stream(self) -> bool:
        return self.body_type is not None and "stream" in self.body_type.__struct_fields__

    @property
    def method(self) -> str:
        return self.other_method or ("GET" if self.body_type is None else "POST")

    @property
    def route(self) -> Route:
        return Route(self.path, self.answer, methods=[self.method])
