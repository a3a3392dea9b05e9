"""BodyError: the error of an unreadable HTTP body, with the field and the remedy.

Some errors of the decoder do not name the field; this module searches the body for it.
"""

from __future__ import annotations

import json
import re

from ....ipc.codec import JSON_STRING
from ....ipc.errors import RequestError

_BACKTICKED = re.compile(r"`([^`]+)`")
_FIELD = re.compile(r"(?:missing required field `([^`]*)`)?(?: - at `\$\.?([^`]*)`)?$")
_KIND = re.compile(r"Invalid enum value '(.*)' - at `\$\.((?:tools|input|tool_choice)[\[\]\d\w.]*)\.type`")
_TOKENS = re.compile(rf"({JSON_STRING})|([\[{{])|[\]}}]".encode())

KEY_OF = "a key of "
_BODY = "the body"
UNKNOWN_FIELD = "unknown_field"
MAX_QUOTED_CHARACTERS = 600  # of the decoder's error


class BodyError(RequestError):
    """HTTP error of an unreadable body: status, and OpenAI's `param` and `code`."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def invalid_body(error: Exception, raw: bytes | bytearray) -> BodyError:
    """Return the error of a body that is not JSON or does not match the schema, made from msgspec's `error` and the
    body."""
    fault = str(error)  # which may quote a long value or name
    if len(fault) > MAX_QUOTED_CHARACTERS:
        fault = f"{fault[: MAX_QUOTED_CHARACTERS // 2]} … {fault[-MAX_QUOTED_CHARACTERS // 2 :]}"
    message = f"the body cannot be read: {fault}"
    if isinstance(error, RecursionError):
        field = _deepest_field(raw)
        return BodyError(f"{field or 'the body'} is nested too deep to be read: use fewer levels", param=field)
    if isinstance(error, UnicodeDecodeError):
        return BodyError(f"the body is not UTF-8 at byte {_num_decodable(raw)}: encode it so")
    if "unknown field" in message:
        found = _BACKTICKED.search(message)
        return BodyError(message, param=found.group(1) if found else None, code=UNKNOWN_FIELD)
    if "truncated" in message or "surrogate" in message:
        try:
            place = _surrogate(json.loads(raw))
        except (ValueError, RecursionError):
            return BodyError(f"the body ends in the midst of its JSON, after {len(raw)} bytes: send all of it")
        if place is not None:
            steps, is_key, position = place
            field = "".join(reversed(steps)).removeprefix(".") or _BODY
            text = f"{KEY_OF * is_key}{field} holds a lone surrogate at character {position}: give valid Unicode"
            outermost = re.split(r"[.\[]", field)[0]
            return BodyError(text, param=None if outermost == _BODY else outermost)
    if (kind := _KIND.match(str(error))) is not None:
        name = kind.group(2)
        text = f"{name} is of type {kind.group(1)!r:.80}, which is not served: leave it out"
        return BodyError(text, param=re.split(r"[.\[]", name)[0])
    missing = _FIELD.search(message)
    names = () if missing is None else reversed(missing.groups())  # the place before the field that it lacks
    return BodyError(message, param=".".join(filter(None, names)) or None)


def _num_decodable(raw: bytes | bytearray) -> int:
    """Return the number of bytes at the beginning of `raw` that are UTF-8."""
    try:
        return len(raw.decode().encode())
    except UnicodeDecodeError as error:
        return error.start


def _surrogate(value: object) -> tuple[list[str], bool, int] | None:
    """Return the place of the first lone surrogate in `value`: the steps to it, the innermost first, whether it is in a
    key of the object there, and its character position. None if there is none."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return [], False, error.start
    elif isinstance(value, dict):
        for key, each in value.items():
            if (found := _surrogate(key)) is not None:
                return [], True, found[2]
            if (found := _surrogate(each)) is not None:
                found[0].append(f".{key}")
                return found
    elif isinstance(value, list):
        for position, each in enumerate(value):
            if (found := _surrogate(each)) is not None:
                found[0].append(f"[{position}]")
                return found
    return None


def _deepest_field(raw: bytes | bytearray) -> str | None:
    """Return the top-level field with the deepest nesting."""
    depth, deepest, last, field, result = 0, 0, b"", b"", b""
    for found in _TOKENS.finditer(raw):
        text, opening = found.groups()
        if text is not None:
            last = text[1:-1] if depth == 1 else last
        elif opening:
            field = last if depth == 1 else field
            depth += 1
            if depth > deepest:
                deepest, result = depth, field
        else:
            depth -= 1
    return result.decode(errors="replace") or None
