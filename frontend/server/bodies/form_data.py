"""Split a form, a body of type multipart/form-data (RFC 7578), into its parts.

Strict: a form that is cut off, or a part without a name, is refused. The whole body is in memory, and each boundary is
found by one search, so that no content makes this slow; contents are views of the body. A part with a file name is a
file; the name itself and the type are ignored. `form_stream.py` splits forms that are not in memory.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from .body_error import BodyError

MAX_PARTS = 128
MAX_HEAD_BYTES = 8 << 10  # of a part's header lines
MAX_PADDING_BYTES = 128  # blanks behind a boundary
CRLF = b"\r\n"
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")  # RFC 2046, 5.1.1
_OF_TYPE = re.compile(r""";\s*boundary\s*=\s*(?:"([^"]*)"|([^\s;"]+))""", re.IGNORECASE)
_PARAMETER = re.compile(r""";\s*([\w!#$%&'*+.^`|~-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))\s*""", re.DOTALL)
_ENCODINGS = ("7bit", "8bit", "binary")  # of a content that is sent as it is


class FormPart(NamedTuple):
    """A field of a form, or a file."""

    name: str
    content: memoryview
    is_file: bool


class PartHead(NamedTuple):
    """The headers of a part: the name of its field, and that of its file; None: it is no file."""

    name: str
    filename: str | None


def boundary_of(content_type: str) -> str:
    """Return the boundary that a content type names; BodyError without a valid one."""
    found = _OF_TYPE.search(content_type)
    boundary = "" if found is None else found[1] or found[2] or ""
    if not _BOUNDARY.fullmatch(boundary):
        raise BodyError(
            "the header content-type names no boundary of 1 to 70 characters: send multipart/form-data; boundary=…, as "
            "HTTP clients do by themselves"
        )
    return boundary


def form_parts(body: bytes | bytearray, boundary: str) -> list[FormPart]:
    """Return the parts of a form in order; BodyError if it is not well-formed, cut off, or has too many parts.

    Anything before the first boundary and after the last is ignored, as RFC 2046 demands.
    """
    delimiter, view, parts = b"--" + boundary.encode(), memoryview(body), list[FormPart]()
    place = 0
    if not body.startswith(delimiter):
        found = body.find(CRLF + delimiter)
        if found < 0:
            raise no_boundary(len(body))
        place = found + len(CRLF)
    while True:
        place += len(delimiter)
        if body[place : place + 2] == b"--":
            return parts
        if len(parts) == MAX_PARTS:
            raise many_parts()
        line_end = body.find(CRLF, place, place + MAX_PADDING_BYTES)
        if line_end < 0 and len(body) - place < MAX_PADDING_BYTES:
            raise cut_form(len(body), len(parts))
        if line_end < 0 or body[place:line_end].strip(b" \t"):
            raise stray_boundary(len(parts))
        head_end = body.find(CRLF + CRLF, line_end, line_end + MAX_HEAD_BYTES)
        if head_end < 0:
            if len(body) - line_end < MAX_HEAD_BYTES:
                raise cut_form(len(body), len(parts))
            raise long_head(len(parts) + 1)
        name, filename = part_head(bytes(body[line_end:head_end]), len(parts) + 1)
        start = head_end + 2 * len(CRLF)
        end = body.find(CRLF + delimiter, start - len(CRLF))  # the empty line may be the one before the boundary
        if end < 0:
            raise cut_form(len(body), len(parts), name)
        parts.append(FormPart(name, view[start : max(start, end)], filename is not None))
        place = end + len(CRLF)


def part_head(head: bytes, number: int) -> PartHead:
    """Read the header lines of part `number`; BodyError if they name no field."""
    headers: dict[str, str] = {}
    try:
        for line in head.decode().split("\r\n"):
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
    except UnicodeDecodeError:
        raise BodyError(f"part {number} of the form has headers that are not UTF-8: encode them so") from None
    kind, semicolon, rest = headers.get("content-disposition", "").partition(";")
    parameters = _parameters(semicolon + rest)
    name = "" if parameters is None else parameters.get("name", "")
    if parameters is None or kind.strip().lower() != "form-data" or not name:
        raise BodyError(
            f"part {number} of the form has no header `Content-Disposition: form-data; name=…`: name the field there"
        )
    encoding = headers.get("content-transfer-encoding", "binary").lower()
    if encoding not in _ENCODINGS:
        raise BodyError(f"{name:.80} comes with content-transfer-encoding {encoding:.40}: send it as it is", param=name)
    return PartHead(name, _file_name(parameters))


def _file_name(parameters: dict[str, str]) -> str | None:
    """Return the name that the parameters give a file, the extended one (RFC 8187) if there are both; None without
    one."""
    extended = parameters.get("filename*", "").split("'", 2)
    if len(extended) == 3:
        return unquote(extended[2], errors="replace")
    return parameters.get("filename", "" if "filename*" in parameters else None)


def _parameters(text: str) -> dict[str, str] | None:
    """Return the parameters `; name=value…` of a header; None if they are not well-formed or one comes twice."""
    found: dict[str, str] = {}
    place = 0
    while place < len(text):
        match = _PARAMETER.match(text, place)
        if match is None or match[1].lower() in found:
            return None
        found[match[1].lower()] = match[3] or re.sub(r"\\(.)", r"\1", match[2] or "")
        place = match.end()
    return found


def cut_form(num_bytes: int, num_parts: int, name: str = "") -> BodyError:
    where = f"{name:.80}, " if name else ""
    text = f"the form ends in the midst of {where}part {num_parts + 1}, after {num_bytes} bytes: send all of it"
    return BodyError(text, param=name or None)


def stray_boundary(num_parts: int) -> BodyError:
    return BodyError(
        f"before part {num_parts + 1} of the form the boundary is followed by other text: choose a boundary that no "
        "content contains"
    )


def many_parts() -> BodyError:
    return BodyError(f"the form has over {MAX_PARTS} parts: send fewer")


def long_head(number: int) -> BodyError:
    return BodyError(f"part {number} of the form has over {MAX_HEAD_BYTES} bytes of headers: send fewer")


def no_boundary(num_bytes: int) -> BodyError:
    return BodyError(f"the form of {num_bytes} bytes does not contain its boundary: send parts between boundaries")
