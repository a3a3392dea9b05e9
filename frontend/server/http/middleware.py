"""HttpMiddleware: checks the caller and the body size of HTTP requests, and turns exceptions into error answers.

If API keys are set, a caller must send one of them. Otherwise the request must not come from a web page of another site
(`listening/web_pages.py`).

Errors have OpenAI's form, on Anthropic's and Ollama's paths theirs. Each answer gets `x-request-id` (the caller's or a
new one), the caller's W3C trace context, and a `warning` if fields of the body were ignored. It is plain ASGI, because
every streamed token passes through it.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ....ipc.errors import TokenloomError
from ....ipc.notes.deadly import REFUSAL, NotedCoroutine, ReadingNote
from ....ipc.process.faults import maybe_fail
from ...forms.anthropic.errors import has_message_errors, message_error
from ...forms.ollama.errors import has_ollama_errors, ollama_error
from ...forms.openai.errors import HttpError, json_response, to_http_error
from ...listening.keys.api_keys import ApiKey, ApiKeys
from ...listening.web_pages import WebPages
from ..api.continuation import current, working_on
from ..api.keep_alive import KEEP_ALIVE, KeepAlive
from ..api.openai.events import DONE, SERVER_SEND, EventStream, event, only_end
from ..api.response_warnings import collect_warnings
from ..metrics.access_record import access_record
from ..metrics.tracing import TraceContext, incoming_trace, read_trace_context
from .web.files import ASSETS

logger = logging.getLogger("tokenloom.http")

PROBE_PATHS = frozenset(("/health", "/ready", "/metrics", "/ping", "/load"))  # served even above the connection limit
OPEN_PAGES = frozenset(  # static: they hold no data
    ("/", "/dashboard", "/chat", "/docs", "/redoc", "/favicon.ico", *(f"/{name}" for name in ASSETS))
)
OPEN_PATHS = PROBE_PATHS | OPEN_PAGES | {"/version", "/openapi.json"}
STREAMED_PATHS = frozenset(("/v1/files",))  # their bodies go to the disk as they come, limited by a quota
OWNER = (
    "tokenloom.owner"  # scope key: digest of the caller's API key, which owns all that it stores; missing without keys
)
OVER_LIMIT = "tokenloom.over_limit"  # scope key: the connection exceeds the limit
LOCAL = "tokenloom.local"  # scope key: the client is on this machine
OF_ENGINE = "tokenloom.of_engine"  # scope key: the engine itself asks, for a caller that it has checked
_STORED = re.compile(r"(/v1/(?:responses/(?!input_tokens(?![^/]))|streams/|files/|batches/))[^/]+")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,200}")


class HttpMiddleware:
    """ASGI middleware around `app`. All paths except OPEN_PATHS require one of the API keys, if any are set, and
    otherwise a request that `pages` accepts. The key of a request is noted in its Continuation."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]],
        keys: ApiKeys,
        max_body_bytes: int,
        on_refused: Callable[[str], None],
        root_path: str = "",
        pages: WebPages | None = None,
        note: ReadingNote | None = None,
        keep_alive: KeepAlive | None = None,
    ) -> None:
        """`on_refused` is called with the reason of each refusal (a metric label). `root_path` is removed from paths if
        the proxy has left it there. `note` records which request, probes excepted, is being worked on; None: a note in
        memory."""
        self._app = app
        self._on_refused, self._note = on_refused, note or ReadingNote()
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._root_path = root_path
        self._pages = pages or WebPages()
        self._keep_alive = keep_alive or KeepAlive(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with working_on(current()):
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, with an error if the app raises one."""
        headers = dict(scope["headers"])
        trace = read_trace_context(scope["headers"])
        incoming_trace.set(trace)
        if self._root_path and f"{scope['path']}/".startswith(f"{self._root_path}/"):
            scope["path"] = scope["path"].removeprefix(self._root_path) or "/"
        is_anthropic = has_message_errors(scope["path"], headers)
        extra = _headers_to_add(headers, trace, is_anthropic)
        warnings = collect_warnings()
        has_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message.get("headers", ()), *extra]
                if warnings:  # RFC 7234, 5.5
                    text = "; ".join(warnings).replace("\\", r"\\").replace('"', r"\"")
                    message["headers"].append((b"warning", f'299 - "{text}"'.encode()))
            await send(message)

        scope.setdefault(SERVER_SEND, send)
        scope[KEEP_ALIVE] = self._keep_alive
        scope["app"] = self  # makes Starlette's router raise HTTPException instead of answering
        try:
            self._check(scope, headers)
            await self._run(scope, receive, send_with_headers)
        except ClientDisconnect:  # the client disconnected before its body was complete
            return
        except Exception as error:
            response = _error_response(error, scope)
            if current().is_resumed:
                response = in_stream(response, scope["path"])
            if not has_started:
                await response(scope, receive, send_with_headers)
        finally:
            del scope[SERVER_SEND]  # it refers to the scope: break the cycle

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if OVER_LIMIT in scope and scope["path"] not in PROBE_PATHS:
            self._on_refused("connections")
            message = "the server has as many connections as it can hold: try again later"
            again = {"retry-after": "1", "connection": "close"}
            raise HttpError(503, message, "overloaded_error", code="overloaded", headers=again)
        is_open = scope["path"] in OPEN_PATHS and (scope["path"] not in OPEN_PAGES or scope["method"] != "POST")
        if OF_ENGINE in scope:
            current().api_key = self._keys.of_owner(scope.get(OWNER, b""))
        elif not is_open:
            self._check_caller(scope, headers)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes(scope):
            self._on_refused("size")
            raise self._too_large()

    def _max_bytes(self, scope: Scope) -> float:
        """Return the largest body of a request."""
        return math.inf if scope["path"] in STREAMED_PATHS else self._max_body_bytes

    def _check_caller(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if self._keys.are_required:
            key = self._key_of(headers)
            if key is None:
                self._on_refused("key")
                message = (
                    f"{_credential_fault(headers)}: send the header `Authorization: Bearer KEY`, or `x-api-key: KEY`"
                )
                raise HttpError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            scope[OWNER], current().api_key = key.owner, key
            if (record := access_record.get()) is not None:
                given = headers.get(b"authorization", b"") + headers.get(b"x-api-key", b"")
                record.peer += f" {hashlib.sha256(given).hexdigest()[:16]}"
            return
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        address, port = scope.get("server") or (None, None)
        fault = self._pages.host_fault(hosts, None if port is None else address) or self._pages.origin_fault(headers)
        if fault:
            self._on_refused("origin")
            raise HttpError(403, fault, "permission_error")

    def _key_of(self, headers: dict[bytes, bytes]) -> ApiKey | None:
        """Return the key that a request carries; None without a valid one. Anthropic's clients send the key in
        x-api-key, others after a scheme, which is case-insensitive (RFC 9110, 11.1)."""
        alone = headers.get(b"x-api-key", b"").strip()
        if alone and (key := self._keys.find(alone)) is not None:
            return key
        scheme, _, token = headers.get(b"authorization", b"").strip().partition(b" ")
        return self._keys.find(token.strip()) if scheme.lower() == b"bearer" else None

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app. Record each slice of its work on this request under a key made of the method, path, query and
        the body received so far.

        HttpError 413 once the body exceeds the limit, since content-length may be absent; HttpError 400 if the request
        has ended frontends before (see ReadingNote)."""
        if scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
            return
        num_bytes, found = 0, self._note.new_hash()
        max_bytes = self._max_bytes(scope)
        found.update(f"{scope['method']} {scope['path']}?".encode(errors="replace"))
        found.update(scope.get("query_string", b"") + b"\n")

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                body = message.get("body", b"")
                num_bytes += len(body)
                if num_bytes > max_bytes:
                    raise self._too_large()
                found.update(body)
                work.key = found.digest()
                self._note.begin(work.key)  # also for the rest of this slice
                self._refuse_deadly(work.key)
                maybe_fail("frontend.read", num_bytes)
            return message

        work = NotedCoroutine(self._note, self._app(scope, limited, send), found.digest())
        try:
            self._refuse_deadly(work.key)
            await work
        finally:
            work.close()  # in case it was refused before it started

    def _refuse_deadly(self, key: bytes) -> None:
        if self._note.is_deadly(key):
            self._on_refused("deadly")
            raise HttpError(400, REFUSAL, code="deadly_request")

    def _too_large(self) -> HttpError:
        limit = self._max_body_bytes
        return HttpError(413, f"the body has more than {limit} bytes: send less or raise --max-body-bytes")


def _error_response(error: Exception, scope: Scope) -> Response:
    """Return the answer to a failed request, and log the error if it is a bug.

    This is a function of its own because no frame in the error's traceback may hold the error: otherwise the request
    would stay in memory until a full garbage collection."""
    answer = _routing_error(error, scope) if isinstance(error, HTTPException) else to_http_error(error)
    if answer.status == 500 and not isinstance(error, TokenloomError):  # a bug, not an expected error
        logger.error("%s %s failed", scope["method"], shown_path(scope["path"]), exc_info=error)
    if has_ollama_errors(scope["path"]):
        return json_response(ollama_error(answer), answer.status, answer.headers)
    has_form = has_message_errors(scope["path"], dict(scope["headers"]))
    body, status = message_error(answer) if has_form else (answer.body, answer.status)
    return json_response(body, status, answer.headers)


def in_stream(error: Response, path: str) -> EventStream:
    """Return an error as the end of a stream that an earlier frontend has begun."""
    body = bytes(error.body)
    end = event(msgspec.Raw(body)) + DONE
    if has_ollama_errors(path):
        end = body + b"\n"
    elif path.endswith(("/v1/messages", "/v1/responses")):
        end = event(msgspec.Raw(body), "error")
    return only_end(end)


def shown_path(path: str) -> str:
    """Return a path for the log, without the id of a stored response or a stream, which alone protects it."""
    return _STORED.sub(r"\1ID", path)


def owner_of(request: Request) -> bytes:
    """Return the digest of the caller's API key, which owns all that it stores; empty if keys are not set."""
    owner: bytes = request.scope.get(OWNER, b"")
    return owner


def _credential_fault(headers: dict[bytes, bytes]) -> str:
    """Return why the credentials are invalid."""
    scheme, _, token = headers.get(b"authorization", b"").strip().partition(b" ")
    if not scheme:
        return "the API key is wrong" if headers.get(b"x-api-key", b"").strip() else "no API key was given"
    if scheme.lower() != b"bearer":
        return "the header authorization does not begin with `Bearer`"
    return "the API key is wrong" if token.strip() else "no API key follows `Bearer`"


def _routing_error(error: HTTPException, scope: Scope) -> HttpError:
    """Return the HttpError for the router's error about an unknown path or method."""
    remedy = "/openapi.json lists all paths"
    if error.status_code == 404 and (near := _near_path(scope)) is not None:
        remedy = f"did you mean {near}? {remedy}"
    elif scope["method"] == "OPTIONS":  # a browser's question about a page of another site
        remedy = "start with --cors-origins and the page's origin to let web pages call"
    message = f"{scope['method']} {scope['path']:.200}: {error.detail.lower()}; {remedy}"
    return HttpError(error.status_code, message, headers=dict(error.headers or {}))


def _near_path(scope: Scope) -> str | None:
    """Return the path that was probably meant: without /v1 at its start, with /v1 before it, or without the slash at
    its end; None if no endpoint has any of these."""
    known = {getattr(route, "path", "") for route in getattr(scope.get("router"), "routes", ())}
    path: str = scope["path"].rstrip("/")
    once = path.removeprefix("/v1")
    return next((each for each in (once, f"/v1{once}", path) if each != scope["path"] and each in known), None)


def _headers_to_add(headers: dict[bytes, bytes], trace: TraceContext, is_anthropic: bool) -> list[tuple[bytes, bytes]]:
    request_id = headers.get(b"x-request-id", b"")
    if not _REQUEST_ID.fullmatch(request_id):
        request_id = current().digits("x-request-id").encode()
    carried = [(name.encode(), value.encode()) for name, value in trace._asdict().items() if value]
    named = [(b"request-id", request_id)] if is_anthropic else []  # Anthropic's name
    return [(b"x-request-id", request_id), *named, *carried]
