"""ControlEndpoints: pause, reload, sleep, profile and similar commands over HTTP, as the client library has them.

If --api-key is set, the key is required. Otherwise, except for /is_sleeping, only callers on this machine are accepted:
on unix sockets and loopback ports. Of web pages only our own are then accepted, because a browser lets any page post to
a local port.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ....ipc.codec import JsonObject
from ....ipc.digits import whole_number
from ....ipc.messages.base import MemoryTag, PauseMode
from ....ipc.messages.client import Control, ControlAction, LoadAdapter
from ....ipc.process.log import LogLevel
from ....ipc.spec.config.engine_spec import EngineSpec
from ...forms.field import means, unused
from ...forms.openai.errors import HttpError, json_response
from ...forms.queries import prefetch_query, sleep_query, wake_up_query
from ...listening.web_pages import WebPages
from ..adapters.manager import NotFound
from ..api.openai.local_engine import LocalEngine
from ..api.operator_only import check_operator
from ..requests.frontend import Frontend
from .endpoint import Endpoint
from .middleware import LOCAL

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class PauseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Treatment of running requests: keep (freeze them), wait (finish them first) or abort."""

    EXAMPLE: ClassVar[JsonObject] = {"mode": "keep"}

    mode: Annotated[PauseMode, means("Freeze running requests, finish them first, or abort them.")] = "keep"


class EmptyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body without fields."""


class ReloadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Checkpoint to load: a folder on the engine's machine or a hub id, of the served architecture and shape."""

    model: Annotated[str, means("Folder on the engine's machine, or hub id.")]


class RestartRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Number of the replica to restart; if absent, all replicas are restarted, one after the other."""

    replica: Annotated[int | None, means("Number of the replica.", "all, one after the other")] = None


class LogLevelRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lowest level of the log lines that all processes of the engine write."""

    EXAMPLE: ClassVar[JsonObject] = {"level": "info"}

    level: Annotated[LogLevel, means("The lowest level that is logged.")]


class PrefetchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompt whose KV blocks are to be loaded: prompt (a text or token ids) or prompt_token_ids."""

    EXAMPLE: ClassVar[JsonObject] = {"prompt": "The capital of France is"}

    prompt: Annotated[str | list[int] | None, means("The text or its token ids; give it or prompt_token_ids.")] = None
    prompt_token_ids: Annotated[list[int] | None, means("The token ids.")] = None
    cache_salt: Annotated[str | None, means("The salt of the requests that will come.", "none")] = None
    model: Annotated[str | None, means("The LoRA adapter of the requests that will come.", "the served model")] = None


class LoadAdapterRequest(msgspec.Struct, frozen=True):
    """Adapter to load: a folder below --adapter-folder, and the name that requests will give as their model."""

    EXAMPLE: ClassVar[JsonObject] = {"lora_name": "sql", "lora_path": "sql"}

    lora_name: Annotated[str, means("Name that requests will give as their model.")] = ""
    lora_path: Annotated[str, means("Folder of the adapter, below --adapter-folder.")] = ""
    load_inplace: Annotated[bool, means("Replace the adapter that has this name.")] = False


class UnloadAdapterRequest(msgspec.Struct, frozen=True):
    """Adapter to unload, by its name; lora_int_id is ignored."""

    EXAMPLE: ClassVar[JsonObject] = {"lora_name": "sql"}

    lora_name: Annotated[str, means("Name of the adapter.")] = ""
    lora_int_id: Annotated[int | None, unused("Number of the adapter at vLLM.")] = None


class ControlEndpoints:
    """Handlers of commands, which answer once the engine has executed them, and of queries for their state."""

    def __init__(self, engine: LocalEngine, frontend: Frontend, spec: EngineSpec) -> None:
        self._engine, self._frontend, self._spec = engine, frontend, spec
        self._has_key = spec.config.has_keys
        self._own_pages = WebPages.of(spec.config, has_others=False)

    def endpoints(self) -> list[Endpoint]:
        fields, empty = msgspec.structs.asdict, EmptyRequest
        return [
            self._command("pause", "Start no new requests until /resume", PauseRequest, lambda it: {"paused": it.mode}),
            self._command("resume", "Continue after a pause", empty, lambda _: {"paused": None}),
            self._command("reload", "Load the weights of another checkpoint", ReloadRequest, fields),
            Endpoint("/sleep", self.sleep, "Free memory until /wake_up: ?level=1 or 2", empty),
            Endpoint("/wake_up", self.wake_up, "Allocate it again, all or the tags in the query", empty),
            Endpoint("/is_sleeping", self.is_sleeping, "Whether memory has been freed by /sleep"),
            self._command("restart_replicas", "Restart a replica, or one after the other", RestartRequest, fields),
            self._command("reset_prefix_cache", "Empty the prefix cache", empty, lambda _: {"success": True}),
            Endpoint("/kv", self.kv, "KV blocks in the pool, in each group and in each tier, with the tiers' errors"),
            Endpoint("/kv/clear", self.clear_kv, "Remove all KV blocks from the pool and all tiers", empty),
            Endpoint("/kv/prefetch", self.prefetch_kv, "Load the KV blocks of a prompt into memory", PrefetchRequest),
            self._command("start_profile", "Start profiling the workers", empty, lambda _: {"profiling": True}),
            self._command("stop_profile", "Write a Chrome trace per worker", empty, lambda _: {"profiling": False}),
            Endpoint("/log_level", self.log_level, "The lowest level that is logged"),
            self._command("log_level", "Set the log level", LogLevelRequest, fields),
            Endpoint("/v1/load_lora_adapter", self.load_adapter, "Load a LoRA adapter", LoadAdapterRequest),
            Endpoint("/v1/unload_lora_adapter", self.unload_adapter, "Unload a LoRA adapter", UnloadAdapterRequest),
        ]

    def _command(
        self, action: ControlAction, summary: str, body_type: type[BodyT], answer: Callable[[BodyT], JsonObject]
    ) -> Endpoint:
        """Return the endpoint of a command whose parameters are the fields of its body. `answer` returns the JSON for
        success."""

        async def handle(request: Request) -> Response:
            body = await self._read(request, body_type)
            await self._engine.control(Control(query_id=0, action=action, **msgspec.structs.asdict(body)))
            return json_response(answer(body))

        return Endpoint(f"/{action}", handle, summary, body_type)

    async def sleep(self, request: Request) -> Response:
        await self._read(request, EmptyRequest)
        query = request.query_params
        level, mode = query.get("level", "1"), cast(PauseMode, query.get("mode", "keep"))
        number = whole_number(level)
        await self._engine.control(sleep_query(level if number is None else number, mode)(query_id=0))
        return json_response({"is_sleeping": True})

    async def wake_up(self, request: Request) -> Response:
        await self._read(request, EmptyRequest)
        tags = cast(list[MemoryTag], request.query_params.getlist("tags")) or None
        await self._engine.control(wake_up_query(tags)(query_id=0))
        return json_response({"is_sleeping": self._frontend.health().is_asleep})

    async def is_sleeping(self, request: Request) -> Response:
        return json_response({"is_sleeping": self._frontend.health().is_asleep})

    async def kv(self, request: Request) -> Response:
        self._check(request)
        metrics = self._frontend.metrics
        pool = {"blocks": metrics.num_kv_blocks, "free": metrics.progress.num_free_blocks}
        tiers = None if metrics.tiers is None else metrics.tiers.summary()
        groups = metrics.core.groups.summary()
        size = self._spec.config.block_size
        return json_response({"block_size": size, "pool": pool, "groups": groups, "tiers": tiers})

    async def clear_kv(self, request: Request) -> Response:
        await self._read(request, EmptyRequest)
        await self._engine.control(Control(query_id=0, action="clear_kv_cache"))
        return json_response({"success": True})

    async def prefetch_kv(self, request: Request) -> Response:
        body = await self._read(request, PrefetchRequest)
        fields = {name: value for name, value in msgspec.structs.asdict(body).items() if value is not None}
        model, content = fields.pop("model", None), fields.get("prompt")
        prompt = fields if content is None or isinstance(content, str) else {"prompt_token_ids": content, **fields}
        if prompt is not fields:
            del prompt["prompt"]
        done = await self._engine.control(prefetch_query(prompt, model)(query_id=0))
        return json_response({"num_tokens": done.num_tokens})

    async def load_adapter(self, request: Request) -> Response:
        """Load an adapter from a folder below --adapter-folder. Statuses and texts are vLLM's. HttpError 400 if a field
        is missing, 404 if the folder does not exist."""
        body = await self._read_order(request, LoadAdapterRequest)
        if not body.lora_name or not body.lora_path:
            raise HttpError(400, "Both 'lora_name' and 'lora_path' must be provided.", param="lora_name")
        query = LoadAdapter(query_id=0, name=body.lora_name, path=body.lora_path, is_inplace=body.load_inplace)
        try:
            await self._engine.load_adapter(query)
        except NotFound as error:
            raise HttpError(404, str(error), "NotFoundError", param="lora_path") from None
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """Unload an adapter. Statuses and texts are vLLM's. HttpError 400 if the name is missing, 404 if it is
        unknown."""
        body = await self._read_order(request, UnloadAdapterRequest)
        if not body.lora_name:
            raise HttpError(400, "'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name")
        try:
            self._frontend.adapters.unload(body.lora_name)
        except NotFound as error:
            raise HttpError(404, str(error), "NotFoundError", param="lora_name") from None
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _read_order(self, request: Request, body_type: type[BodyT]) -> BodyT:
        """Return the body of an order about adapters; HttpError 403 unless --allow-runtime-lora is set."""
        if not self._spec.config.allow_runtime_lora:
            raise HttpError(
                403, "adapters are not loaded over HTTP here: start with --allow-runtime-lora and --adapter-folder"
            )
        return await self._read(request, body_type)

    async def log_level(self, request: Request) -> Response:
        self._check(request)
        return json_response({"level": self._frontend.log_level})

    async def _read(self, request: Request, body_type: type[BodyT]) -> BodyT:
        """Check that the caller may send commands, and return the decoded body, which may be empty if all fields have
        defaults."""
        self._check(request)
        has_defaults = not any(each.required for each in msgspec.structs.fields(body_type))
        if has_defaults and not await request.body():
            return body_type()
        return (await self._engine.bodies.read(request, body_type)).body

    def _check(self, request: Request) -> None:
        """Raise HttpError 403 for a key with a name, which is that of one caller among others, and if no API key is
        set, for a remote caller or a page of another site.

        HttpMiddleware checks the key if one is set, and has already refused most pages; pages of --cors-origins, which
        it lets pass, are refused here."""
        check_operator()
        if self._has_key:
            return
        if self._own_pages.origin_fault(dict(request.scope["headers"])):
            raise HttpError(403, "without --api-key web pages may not send control requests: give the engine a key")
        if LOCAL not in request.scope:
            raise HttpError(
                403,
                "without --api-key control requests are accepted only on 127.0.0.1 and unix sockets: give the engine a "
                "key",
            )
