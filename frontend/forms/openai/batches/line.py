"""One line of a batch's input file, and of its output files, in OpenAI's form. Does not know the fields of bodies."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

MAX_QUOTED_CHARACTERS = 200  # of a file's text in a message
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")


class BatchLine(msgspec.Struct, frozen=True):
    """A request of a batch."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class WholeAnswer(msgspec.Struct, frozen=True):
    """Fields of a body that ask for something else than one whole answer."""

    stream: object = None
    background: object = None


class LineFault(NamedTuple):
    """Why a line cannot be run, in OpenAI's form."""

    code: str
    message: str
    param: str | None = None


def read_line(raw: bytes | memoryview) -> BatchLine | LineFault:
    """Return the request in a line, or why it is none: it must be an object with custom_id, url and a body that asks
    for one whole answer."""
    try:
        line = msgspec.json.decode(raw, type=BatchLine)
    except msgspec.ValidationError as error:
        return _of_schema(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return LineFault("invalid_json_line", f"the line is not JSON: {error}: write each request as one line of JSON")
    if line.method != "POST":
        return LineFault("invalid_method", f"method is {_quoted(line.method)}: it must be POST", "method")
    if not line.custom_id:
        return LineFault("missing_required_parameter", "custom_id is empty: give each line one of its own", "custom_id")
    try:
        asked = msgspec.json.decode(line.body, type=WholeAnswer)
    except msgspec.ValidationError:
        return LineFault("invalid_type", "body must be an object: give the request's fields there", "body")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return LineFault("invalid_json_line", f"body is not JSON: {error}: write it as in a request", "body")
    for name in asked.__struct_fields__:
        if getattr(asked, name) is True:
            message = f"{name} is true, but a line of a batch gets one whole answer: leave it out"
            return LineFault("invalid_request", message, f"body.{name}")
    return line


def url_fault(line: BatchLine, endpoint: str) -> LineFault | None:
    """Return the fault of a line for another endpoint than the batch's."""
    if line.url == endpoint:
        return None
    return LineFault(
        "invalid_url", f"url is {_quoted(line.url)}, the batch is for {endpoint}: send a batch for each url", "url"
    )


def _of_schema(message: str) -> LineFault:
    if (missing := _MISSING.search(message)) is not None:
        name = missing[1]
        return LineFault("missing_required_parameter", f"{name} is missing: add it to the line", name)
    place = _PLACE.search(message)
    name = place[1] if place is not None else ""
    text = message[: place.start()] if place is not None else message
    wrong = f"{text[0].lower()}{text[1:]}"
    return LineFault("invalid_type", f"{name or 'the line'}: {wrong}: write it so", name or None)


def _quoted(text: str) -> str:
    return repr(text[:MAX_QUOTED_CHARACTERS])


class OutputId(NamedTuple):
    """Identity of a line of an output file."""

    id: str  # batch_req_…
    custom_id: str


def answered_line(ids: OutputId, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line of an answer. `body`: JSON in one line."""
    return b'{"id":%b,"custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":%b},"error":null}\n' % (
        msgspec.json.encode(ids.id),
        msgspec.json.encode(ids.custom_id),
        status,
        msgspec.json.encode(request_id),
        body,
    )


def unanswered_line(ids: OutputId, code: str, message: str) -> bytes:
    """Return the line of a request that has no answer."""
    error = {"code": code, "message": message}
    shown = {"id": ids.id, "custom_id": ids.custom_id, "response": None, "error": error}
    return msgspec.json.encode(shown) + b"\n"
