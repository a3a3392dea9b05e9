"""BodyReader: receives and decodes the bodies of HTTP requests.

The event loop decodes a small body. An intake process (`bodies/process.py`) decodes a large one, tokenizes long prompts
and returns the rest in bounded size; a large body for an endpoint without prompts is refused. The event loop joins the
chunks of a large body only to store it (Responses, at most MAX_RECORD_BYTES), and never decodes it as a whole.
"""

from __future__ import annotations

import logging
import re
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable

import msgspec
from starlette.requests import ClientDisconnect, Request

from .....ipc.errors import Overloaded, RequestError
from .....ipc.messages.intake import BodyRead, IntakeAnswer, NotRead, ReadBody
from ....forms.openai.errors import HttpError
from ....forms.openai.response_body import ResponsesRequest
from ....forms.openai.transcription_body import FORM_TYPE, Form
from ....forms.prompt_limits import PromptLimits
from ....state.responses import MAX_RECORD_BYTES
from ...bodies.body_error import BodyError
from ...bodies.body_packer import LARGE_TYPES
from ...bodies.body_parser import SMALL_BYTES, BodyT, ParsedBody, parse_body
from ...bodies.form_data import boundary_of
from ...bodies.form_parser import parse_form
from ...helpers.intake import IntakeHelper, IntakePool, ask_intake
from ...helpers.pool import PoolJob
from ...helpers.task import Then, in_event_loop, reply_of
from ..continuation import current
from ..response_warnings import warn
from .events import until_disconnect

logger = logging.getLogger("tokenloom.http")

_JSON = re.compile(r"application/([^/]+\+)?json")

LOG_EVERY_S = 60.0  # interval between log lines about unknown fields
MAX_HELD_BYTES = 1 << 30  # limit of all bodies being received or decoded together


class BodyReader:
    """Reader of request bodies. It refuses a body (Overloaded) if all bodies being received or decoded would together
    have more than `max_held_bytes`."""

    def __init__(
        self,
        pool: IntakePool,
        limits: PromptLimits,
        *,
        is_strict: bool = False,
        max_held_bytes: int = MAX_HELD_BYTES,
        hold: Callable[[Iterable[bytes]], None] = lambda digests: None,
    ) -> None:
        """`is_strict`: refuse unknown fields, which are otherwise removed with a warning. `hold` is called in a thread
        of the pool with the digests of a large body's images, to keep them until the request that uses them is
        submitted."""
        self._hold_media = hold
        self._pool = pool
        self._limits = limits
        self._is_strict = is_strict
        self._max_held_bytes = max_held_bytes
        self._log_at = 0.0  # earliest time of the next log line about unknown fields
        self._num_held = 0

    async def read(
        self, request: Request, body_type: type[BodyT], *, takes_any_type: bool = False
    ) -> ParsedBody[BodyT]:
        """Receive the body and return it decoded; name removed unknown fields in a warning of the response. With
        `takes_any_type` the body is JSON whatever the content type says.

        HttpError if the headers do not announce plain JSON (or a form, for a form's type), or if the body is empty, too
        large or does not match the schema; RequestError for an invalid value; Overloaded at the limit for the bytes of
        all bodies; ClientDisconnect if the client disconnects."""
        coding = request.headers.get("content-encoding", "identity")
        if coding != "identity":
            raise HttpError(415, f"the body comes with content-encoding {coding:.40}: send it as it is")
        boundary = "" if takes_any_type else _boundary(request.headers.get("content-type", ""), body_type)
        chunks, num_bytes = [], 0
        try:
            async for chunk in request.stream():
                chunks.append(chunk)
                num_bytes += len(chunk)
                self._hold(len(chunk))
            reading = self.parse(chunks, num_bytes, body_type, "{}:{}".format(*request.client or ("", 0)), boundary)
            is_large = num_bytes > SMALL_BYTES
            parsed = await until_disconnect(request.receive, reading) if is_large else await reading
        finally:
            self._num_held -= num_bytes
        if parsed is None:
            raise ClientDisconnect
        if body_type is ResponsesRequest and num_bytes <= MAX_RECORD_BYTES:
            parsed = parsed._replace(raw=b"".join(chunks).removeprefix(BOM_UTF8))
        if parsed.ignored:
            self._warn(request, ", ".join(parsed.ignored))
        return parsed

    def _warn(self, request: Request, ignored: str) -> None:
        """Name the ignored fields in a response header, and at most once per LOG_EVERY_S in the log."""
        warning = f"unknown fields were ignored: {ignored}"
        warn(warning)
        if (now := time.monotonic()) >= self._log_at:
            self._log_at = now + LOG_EVERY_S
            logger.warning("%s: %s; --strict-fields refuses them", request.scope["path"], warning)

    def _hold(self, num_bytes: int) -> None:
        self._num_held += num_bytes
        if self._num_held > self._max_held_bytes:
            raise Overloaded(
                f"{self._num_held} bytes of HTTP bodies are held until they are read, at most {self._max_held_bytes} "
                "may be: ask again later"
            )

    async def parse(
        self, chunks: list[bytes], num_bytes: int, body_type: type[BodyT], owner: str = "", boundary: str = ""
    ) -> ParsedBody[BodyT]:
        """Decode a body and return it; errors as in `read`, and HttpError 413 if a large body's type is not in
        LARGE_TYPES.

        Intake processes share their time fairly among `owner`s, which are client connections. `boundary`: the boundary
        of a form; empty: the body is JSON."""
        if not num_bytes:
            raise HttpError(400, f"the body is empty: send {'a form' if boundary else 'a JSON object'}")
        name, is_small = body_type.__name__, num_bytes <= SMALL_BYTES
        if not is_small and name not in LARGE_TYPES:
            raise HttpError(413, f"the body has {num_bytes} bytes, at most {SMALL_BYTES} are read here: send less")

        now = current().created

        def start(then: Then[ParsedBody[BodyT]]) -> PoolJob[IntakeHelper] | None:
            most = self._limits.max_bytes_per_token
            question = ReadBody(body_type=name, boundary=boundary, max_bytes_per_token=most, now=now)
            return self._pool.run(
                lambda helper: self._unpacked(ask_intake(helper, question, chunks), body_type),
                then,
                num_bytes=num_bytes,
                owner=owner,
            )

        try:
            if is_small and boundary:
                return parse_form(b"".join(chunks), boundary, body_type, is_strict=self._is_strict)
            if is_small:
                return parse_body(b"".join(chunks), body_type, self._limits, is_strict=self._is_strict)
            return await in_event_loop(reply_of(start, self._pool.cancel))
        except BodyError as error:
            raise _http_error(error) from None

    def _unpacked(self, answer: IntakeAnswer, body_type: type[BodyT]) -> ParsedBody[BodyT]:
        """Return the body that an intake process has decoded. Raise RequestError or BodyError if the process reports an
        error."""
        if isinstance(answer, BodyRead):
            self._hold_media(medium.digest for each in answer.inputs for medium in each.media if medium.digest)
            return ParsedBody(msgspec.json.decode(answer.rest, type=body_type), answer.inputs, answer.ignored)
        assert isinstance(answer, NotRead), "the reply to ReadBody"
        if answer.param is None and answer.code is None and answer.status == 400:
            raise RequestError(answer.message)
        raise BodyError(answer.message, answer.status, answer.param, answer.code)


def _boundary(content_type: str, body_type: type[msgspec.Struct]) -> str:
    """Return the boundary of a form, or "" if bodies of this type are JSON. HttpError 415 for another content type."""
    media_type = content_type.partition(";")[0].strip().lower()
    if issubclass(body_type, Form):
        if media_type != FORM_TYPE:
            raise HttpError(415, f"the body comes as {media_type or 'no type':.80}: send a form, {FORM_TYPE}")
        try:
            return boundary_of(content_type)
        except BodyError as error:
            raise _http_error(error) from None
    if media_type and not _JSON.fullmatch(media_type):
        raise HttpError(415, f"the body comes as {media_type:.80}: send JSON with content-type application/json")
    return ""


def _http_error(error: BodyError) -> HttpError:
    return HttpError(error.status, str(error), param=error.param, code=error.code)
