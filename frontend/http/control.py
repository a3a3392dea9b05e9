"""ControlEndpoints: the orders of the library's calls over HTTP, with the same errors.

Only for who holds the key. Without a key they are for this machine alone: for callers of a unix socket, or of a port
of the loopback, and then not for web pages, which a browser lets post to any address.
"""

from __future__ import annotations

from typing import TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...ipc.config.engine_spec import EngineSpec
from ...ipc.messages.base import MemoryTag
from ...ipc.messages.client import Control, PauseMode
from ...ipc.process.log import LogLevel
from ..client.base_client import sleep_query, wake_up_query
from ..openai.forms.errors import HttpError, json_response
from ..openai.local_engine import LocalEngine
from ..requests.frontend import Frontend
from .endpoint import Endpoint
from .middleware import LOCAL

OrderT = TypeVar("OrderT", bound=msgspec.Struct)


class PauseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What running requests do: keep (stop where they are), wait (finish first) or abort (end)."""

    mode: PauseMode = "keep"


class ResumeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing more to say."""


class ReloadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A folder on the engine's machine or a hub id, of the architecture and shape that is served."""

    model: str


class LogLevelRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The least level that is logged, by every process."""

    level: LogLevel


class ControlEndpoints:
    """Each answers when it is so."""

    def __init__(self, engine: LocalEngine, frontend: Frontend, spec: EngineSpec) -> None:
        self._engine, self._frontend = engine, frontend
        self._has_key = spec.config.api_key is not None

    def endpoints(self) -> list[Endpoint]:
        endpoints = [
            Endpoint("/pause", self.pause, "Begin nothing new until /resume", PauseRequest),
            Endpoint("/resume", self.resume, "Go on after a pause", ResumeRequest),
            Endpoint("/reload", self.reload, "Take the weights of another checkpoint", ReloadRequest),
            Endpoint("/sleep", self.sleep, "Give memory back until /wake_up: ?level=1 or 2", ResumeRequest),
            Endpoint("/wake_up", self.wake_up, "Take it again, all or the tags in the query", ResumeRequest),
            Endpoint("/is_sleeping", self.is_sleeping, "Whether memory has been given back"),
            Endpoint("/reset_prefix_cache", self.reset_cache, "Find nothing of what is cached now", ResumeRequest),
            Endpoint("/start_profile", self.start_profile, "Record what the workers do", ResumeRequest),
            Endpoint("/stop_profile", self.stop_profile, "Write a Chrome trace for each", ResumeRequest),
            Endpoint("/log_level", self.log_level, "The least level that is logged"),
            Endpoint("/log_level", self.set_log_level, "Change it", LogLevelRequest),
        ]
        return [each._replace(needs_body=_needs_body(each.body_type)) for each in endpoints]

    async def pause(self, request: Request) -> Response:
        order = await self._read(request, PauseRequest)
        await self._engine.control(Control(query_id=0, action="pause", mode=order.mode))
        return json_response({"paused": order.mode})

    async def resume(self, request: Request) -> Response:
        await self._read(request, ResumeRequest)
        await self._engine.control(Control(query_id=0, action="resume"))
        return json_response({"paused": None})

    async def reload(self, request: Request) -> Response:
        order = await self._read(request, ReloadRequest)
        await self._engine.control(Control(query_id=0, action="reload", model=order.model))
        return json_response({"model": order.model})

    async def sleep(self, request: Request) -> Response:
        await self._read(request, ResumeRequest)
        query = request.query_params
        level, mode = query.get("level", "1"), cast(PauseMode, query.get("mode", "keep"))
        await self._engine.control(sleep_query(int(level) if level.isdecimal() else level, mode)(query_id=0))
        return json_response({"is_sleeping": True})

    async def wake_up(self, request: Request) -> Response:
        await self._read(request, ResumeRequest)
        tags = cast(list[MemoryTag], request.query_params.getlist("tags")) or None
        await self._engine.control(wake_up_query(tags)(query_id=0))
        return json_response({"is_sleeping": self._frontend.health().is_asleep})

    async def is_sleeping(self, request: Request) -> Response:
        return json_response({"is_sleeping": self._frontend.health().is_asleep})

    async def reset_cache(self, request: Request) -> Response:
        await self._read(request, ResumeRequest)
        await self._engine.control(Control(query_id=0, action="reset_prefix_cache"))
        return json_response({"success": True})

    async def start_profile(self, request: Request) -> Response:
        await self._read(request, ResumeRequest)
        await self._engine.control(Control(query_id=0, action="start_profile"))
        return json_response({"profiling": True})

    async def stop_profile(self, request: Request) -> Response:
        await self._read(request, ResumeRequest)
        await self._engine.control(Control(query_id=0, action="stop_profile"))
        return json_response({"profiling": False})

    async def log_level(self, request: Request) -> Response:
        self._check(request)
        return json_response({"level": self._frontend.log_level})

    async def set_log_level(self, request: Request) -> Response:
        order = await self._read(request, LogLevelRequest)
        await self._engine.control(Control(query_id=0, action="log_level", level=order.level))
        return json_response({"level": order.level})

    async def _read(self, request: Request, order_type: type[OrderT]) -> OrderT:
        """The order of who may give one. No body at all is an order without details."""
        self._check(request)
        if not _needs_body(order_type) and not await request.body():
            return order_type()
        return (await self._engine.bodies.read(request, order_type)).body

    def _check(self, request: Request) -> None:
        """403 for orders that nobody can answer for. The Gate has seen the key, where there is one."""
        if self._has_key:
            return
        if "origin" in request.headers:
            raise HttpError(403, "without --api-key no web page may give orders: give the engine a key")
        if LOCAL not in request.scope:
            message = "without --api-key orders are taken on 127.0.0.1 and unix sockets alone: give the engine a key"
            raise HttpError(403, message)


def _needs_body(order_type: type[msgspec.Struct] | None) -> bool:
    return order_type is not None and any(each.required for each in msgspec.structs.fields(order_type))
