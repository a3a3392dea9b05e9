"""AccessLog: a line for each HTTP request at its end: who asked for what, what came of it, and how long it took.

    127.0.0.1:51234 POST /v1/completions 200 5312 bytes 0.532 s first 0.021 s tokens 12+34 id 6f1c…

Neither a query string nor a body, so never a prompt. `all` costs two clock readings, a line and, for each event of a
stream, a call; `errors`, the default, does so only for requests that failed, of which no flood can fill a disk.
"""

from __future__ import annotations

import logging
import sys
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...ipc.process.log import write_line
from ..metrics.access_record import AccessRecord, access_record
from ..openai.events import SERVER_SEND
from ..openai.forms.errors import HttpError
from .middleware import PROBE_PATHS

logger = logging.getLogger("tokenloom.http")

MAX_ERRORS_PER_S = 50
MAX_PATH_CHARACTERS = 200


class AccessLog:
    """Wraps the whole application. Counts what it leaves out."""

    def __init__(self, app: ASGIApp, *, has_all: bool) -> None:
        self._app, self._has_all = app, has_all
        self._second = self._num_in_second = self._num_left_out = 0
        self._clock = ""  # the time of day in that second

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = AccessRecord()
        access_record.set(record)

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.first_at, record.status = time.monotonic(), message["status"]
                record.headers = message["headers"]
            else:
                record.num_bytes += len(message.get("body", b""))
                record.is_whole = not message.get("more_body", False)
            await send(message)

        path = scope["path"]
        if not self._has_all:
            scope[SERVER_SEND] = send  # of a stream that is well the bytes need not be known
        try:
            await self._app(scope, receive, counting)
        finally:
            if self._has_all or (record.status >= 400 and path not in PROBE_PATHS):
                self._log(scope, record)

    def _log(self, scope: Scope, record: AccessRecord) -> None:
        now, first, tokens = time.monotonic(), "", ""
        if record.first_at:
            first = f" first {record.first_at - record.begun_at:.3f} s"
        if record.num_prompt_tokens:
            tokens = f" tokens {record.num_prompt_tokens}+{record.num_completion_tokens}"
        path = scope.get("raw_path", b"").decode("ascii", "replace")[:MAX_PATH_CHARACTERS]
        self._write(
            f"{_peer(scope.get('client'))} {scope['method']} {path} {record.status} {record.num_bytes} bytes "
            f"{now - record.begun_at:.3f} s{first}{tokens}{'' if record.is_whole else ' cut'} id {_request_id(record)}",
            now,
        )

    def on_refused(self, client: tuple[str, int] | None, error: HttpError) -> None:
        """Whoever was answered before there was a request."""
        self._write(f"{_peer(client)} - - {error.status} {error}", time.monotonic())

    def _write(self, line: str, now: float) -> None:
        """One line, unless nobody wants it or there are too many errors within a second. Not by way of a logger, which
        takes twice as long as all the rest."""
        if not logger.isEnabledFor(logging.INFO):
            return
        if int(now) != self._second:
            self._second, self._num_in_second = int(now), 0
            self._clock = time.strftime("%H:%M:%S")
            if self._num_left_out:
                write_line(f"{self._clock} INFO frontend: {self._num_left_out} failed HTTP requests more", sys.stderr)
                self._num_left_out = 0
        self._num_in_second += 1
        if self._has_all or self._num_in_second <= MAX_ERRORS_PER_S:
            write_line(f"{self._clock} INFO frontend: {line}", sys.stderr)
        else:
            self._num_left_out += 1


def _peer(client: tuple[str, int] | None) -> str:
    """HOST:PORT; of a client of a unix socket nothing is known."""
    if not client:
        return "unix"
    host = client[0].removeprefix("::ffff:")
    return f"[{host}]:{client[1]}" if ":" in host else f"{host}:{client[1]}"


def _request_id(record: AccessRecord) -> str:
    return next((value.decode() for name, value in record.headers if name == b"x-request-id"), "-")
