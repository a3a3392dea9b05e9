"""Endpoint: one path and method of the HTTP server, with its handler and its entry in /openapi.json.

Does not know the fields of bodies (`forms/openai/schema.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...forms.anthropic.errors import MessageErrorBody, has_message_errors
from ...forms.ollama.errors import OllamaError, has_ollama_errors
from ...forms.openai.errors import ErrorBody


class AnyBody(msgspec.Struct, frozen=True):
    """Body that is accepted but not read."""


class Endpoint(NamedTuple):
    """Route with its documentation. The method is `other_method` if set, else POST if there is a `body_type`, else
    GET."""

    path: str
    answer: Callable[[Request], Awaitable[Response]]
    summary: str = ""  # empty: not listed in /openapi.json
    body_type: type[msgspec.Struct] | None = None
    media_type: str = "application/json"
    other_method: str = ""

    @property
    def method(self) -> str:
        return self.other_method or ("GET" if self.body_type is None else "POST")

    @property
    def error_type(self) -> type[msgspec.Struct]:
        if has_ollama_errors(self.path):
            return OllamaError
        return MessageErrorBody if has_message_errors(self.path) else ErrorBody


def routes(endpoints: Iterable[Endpoint]) -> list[Route]:
    """Return one route per path, so that a 405 answer lists all methods of the path."""
    by_path: dict[str, dict[str, Endpoint]] = {}
    for each in endpoints:
        by_path.setdefault(each.path, {})[each.method] = each

    def route(path: str, by_method: dict[str, Endpoint]) -> Route:
        async def answer(request: Request) -> Response:
            return await by_method["GET" if request.method == "HEAD" else request.method].answer(request)

        return Route(path, answer, methods=list(by_method))

    return [route(*each) for each in by_path.items()]
