"""ControlEndpoints: pause, reload, sleep, profile and similar commands over HTTP, as the client library has them.

With --api-key the key is required. Without one, only callers on this machine are accepted: unix sockets and loopback
ports. Web pages are refused then, because a browser lets any page post to a local port.
"""

from __future__ import annotations

from typing import TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...ipc.codec import JsonObject
from ...ipc.config.engine_spec import EngineSpec
from ...ipc.messages.base import MemoryTag
from ...ipc.messages.client import Control, ControlAction, PauseMode
from ...ipc.process.log import LogLevel
from ..client.base_client import sleep_query, wake_up_query
from ..openai.forms.errors import HttpError, json_response
from ..openai.local_engine import LocalEngine
from ..requests.frontend import Frontend
from .endpoint import Endpoint
from .middleware import LOCAL

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class PauseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Treatment of running requests: keep (freeze them), wait (finish them first) or abort."""

    mode: PauseMode = "keep"


class EmptyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body without fields."""


class ReloadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Checkpoint to load: a folder on the engine's machine or a hub id, of the served architecture and shape."""

    model: str


class LogLevelRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lowest log level that all processes of the engine write."""

    level: LogLevel


class ControlEndpoints:
    """Handlers that answer when the engine has carried out the command."""

    def __init__(self, engine: LocalEngine, frontend: Frontend, spec: EngineSpec) -> None:
        self._engine, self._frontend = engine, frontend
        self._has_key = spec.config.api_key is not None

    def endpoints(self) -> list[Endpoint]:
        endpoints = [
            Endpoint("/pause", self.pause, "Start no new requests until /resume", PauseRequest),
            self._command("/resume", "resume", "Continue after a pause", {"paused": None}),
            Endpoint("/reload", self.reload, "Load the weights of another checkpoint", ReloadRequest),
            Endpoint("/sleep", self.sleep, "Free memory until /wake_up: ?level=1 or 2", EmptyRequest),
            Endpoint("/wake_up", self.wake_up, "Allocate it again, all or the tags in the query", EmptyRequest),
            Endpoint("/is_sleeping", self.is_sleeping, "Whether memory has been freed by /sleep"),
            self._command("/reset_prefix_cache", "reset_prefix_cache", "Empty the prefix cache", {"success": True}),
            self._command("/start_profile", "start_profile", "Start profiling the workers", {"profiling": True}),
            self._command("/stop_profile", "stop_profile", "Write a Chrome trace per worker", {"profiling": False}),
            Endpoint("/log_level", self.log_level, "The lowest level that is logged"),
            Endpoint("/log_level", self.set_log_level, "Set the log level", LogLevelRequest),
        ]
        return [each._replace(needs_body=_needs_body(each.body_type)) for each in endpoints]

    def _command(self, path: str, action: ControlAction, summary: str, answer: JsonObject) -> Endpoint:
        """Make the endpoint of a command without fields; `answer` is the JSON of its success."""

        async def handle(request: Request) -> Response:
            await self._read(request, EmptyRequest)
            await self._engine.control(Control(query_id=0, action=action))
            return json_response(answer)

        return Endpoint(path, handle, summary, EmptyRequest)

    async def pause(self, request: Request) -> Response:
        body = await self._read(request, PauseRequest)
        await self._engine.control(Control(query_id=0, action="pause", mode=body.mode))
        return json_response({"paused": body.mode})

    async def reload(self, request: Request) -> Response:
        body = await self._read(request, ReloadRequest)
        await self._engine.control(Control(query_id=0, action="reload", model=body.model))
        return json_response({"model": body.model})

    async def sleep(self, request: Request) -> Response:
        await self._read(request, EmptyRequest)
        query = request.query_params
        level, mode = query.get("level", "1"), cast(PauseMode, query.get("mode", "keep"))
        await self._engine.control(sleep_query(int(level) if level.isdecimal() else level, mode)(query_id=0))
        return json_response({"is_sleeping": True})

    async def wake_up(self, request: Request) -> Response:
        await self._read(request, EmptyRequest)
        tags = cast(list[MemoryTag], request.query_params.getlist("tags")) or None
        await self._engine.control(wake_up_query(tags)(query_id=0))
        return json_response({"is_sleeping": self._frontend.health().is_asleep})

    async def is_sleeping(self, request: Request) -> Response:
        return json_response({"is_sleeping": self._frontend.health().is_asleep})

    async def log_level(self, request: Request) -> Response:
        self._check(request)
        return json_response({"level": self._frontend.log_level})

    async def set_log_level(self, request: Request) -> Response:
        body = await self._read(request, LogLevelRequest)
        await self._engine.control(Control(query_id=0, action="log_level", level=body.level))
        return json_response({"level": body.level})

    async def _read(self, request: Request, body_type: type[BodyT]) -> BodyT:
        """Check that the caller may send commands, and decode the body. An empty body means default values."""
        self._check(request)
        if not _needs_body(body_type) and not await request.body():
            return body_type()
        return (await self._engine.bodies.read(request, body_type)).body

    def _check(self, request: Request) -> None:
        """Raise 403 for a remote caller or a web page if no key is set. A set key is checked by HttpMiddleware."""
        if self._has_key:
            return
        if "origin" in request.headers:
            raise HttpError(403, "without --api-key web pages may not send control requests: give the engine a key")
        if LOCAL not in request.scope:
            raise HttpError(
                403,
                "without --api-key control requests are accepted only on 127.0.0.1 and unix sockets: give the engine "
                "a key",
            )


def _needs_body(body_type: type[msgspec.Struct] | None) -> bool:
    return body_type is not None and any(each.required for each in msgspec.structs.fields(body_type))
