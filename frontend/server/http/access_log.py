"""AccessLog: a line for a finished HTTP request, with client, path, status, size and time.

    127.0.0.1:51234 POST /v1/completions 200 5312 bytes 0.532 s first 0.021 s tokens 12+34 id 6f1c…

Query strings and bodies, and therefore prompts, are never logged. `all` costs two clock readings and a line per
request, and a call per event of a stream. `errors`, the default, logs only requests with a status of 400 or more, at
most MAX_ERRORS_PER_S a second, so that a flood of them cannot fill a disk.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....ipc.process.log import write_line
from ...forms.openai.errors import HttpError
from ..api.openai.events import SERVER_SEND
from ..metrics.access_record import AccessRecord, access_record
from .middleware import PROBE_PATHS, shown_path

logger = logging.getLogger("tokenloom.http")

MAX_ERRORS_PER_S = 50
MAX_PATH_CHARACTERS = 200


class AccessLog:
    """ASGI middleware around the whole app. `has_all`: log all requests; otherwise only failed ones except probes, and
    at most MAX_ERRORS_PER_S a second."""

    def __init__(self, app: ASGIApp, *, has_all: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._has_all, self._clock = app, has_all, clock
        self._second = self._num_in_second = self._num_dropped = 0
        self._time_of_day = ""  # `_second` as text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = AccessRecord(peer=(scope.get("client") or ("",))[0])
        access_record.set(record)

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.first_at, record.status = self._clock(), message["status"]
                record.headers = message["headers"]
            else:
                record.num_bytes += len(message.get("body", b""))
                record.is_whole = not message.get("more_body", False)
            await send(message)

        path = scope["path"]
        if not self._has_all:
            scope[SERVER_SEND] = send  # bypasses `counting`: bytes of successful streams need not be counted
        try:
            await self._app(scope, receive, counting)
        finally:
            if self._has_all or (record.status >= 400 and path not in PROBE_PATHS):
                self._log(scope, record)

    def _log(self, scope: Scope, record: AccessRecord) -> None:
        now, first, tokens = self._clock(), "", ""
        adapter = f" adapter {record.adapter}" if record.adapter else ""
        request_id = next((value.decode() for name, value in record.headers if name == b"x-request-id"), "-")
        if record.first_at:
            first = f" first {record.first_at - record.begun_at:.3f} s"
        if record.num_prompt_tokens:
            tokens = f" tokens {record.num_prompt_tokens}+{record.num_completion_tokens}"
        path = shown_path(scope.get("raw_path", b"").decode("ascii", "replace"))[:MAX_PATH_CHARACTERS]
        self._write(
            f"{_peer(scope.get('client'))} {scope['method']} {path} {record.status} {record.num_bytes} bytes "
            f"{now - record.begun_at:.3f} s{first}{tokens}{adapter}{'' if record.is_whole else ' cut'} id {request_id}",
            now,
        )

    def on_refused(self, client: tuple[str, int] | None, error: HttpError) -> None:
        """Log a client that got an error before its request reached the app."""
        self._write(f"{_peer(client)} - - {error.status} {error}", self._clock())

    def _write(self, line: str, now: float) -> None:
        """Write a line, unless the log level is above INFO. Without `has_all`, only count the line if this second has
        too many.

        `logging` is bypassed because it would take twice as long as everything else here."""
        if not logger.isEnabledFor(logging.INFO):
            return
        if int(now) != self._second:
            self._second, self._num_in_second = int(now), 0
            self._time_of_day = time.strftime("%H:%M:%S")
            if self._num_dropped:
                write_line(
                    f"{self._time_of_day} INFO frontend: {self._num_dropped} failed HTTP requests more", sys.stderr
                )
                self._num_dropped = 0
        self._num_in_second += 1
        if self._has_all or self._num_in_second <= MAX_ERRORS_PER_S:
            write_line(f"{self._time_of_day} INFO frontend: {line}", sys.stderr)
        else:
            self._num_dropped += 1


def _peer(client: tuple[str, int] | None) -> str:
    """Return an address as HOST:PORT, or "unix" for clients of a unix socket, which have no address."""
    if not client:
        return "unix"
    host = client[0].removeprefix("::ffff:")
    return f"[{host}]:{client[1]}" if ":" in host else f"{host}:{client[1]}"
