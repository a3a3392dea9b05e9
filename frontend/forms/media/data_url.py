"""Decode data: URLs as browsers do (RFC 2397, and https://fetch.spec.whatwg.org/#data-urls). Errors never show the
content."""

from __future__ import annotations

import base64
from urllib.parse import unquote_to_bytes

from ....ipc.errors import RequestError

SCHEME = "data:"
_IN_URLS = str.maketrans("-_", "+/")  # the alphabet of RFC 4648, 5


def is_data_url(url: str) -> bool:
    return url[: len(SCHEME)].lower() == SCHEME


def decode_data_url(url: str) -> bytes:
    """Return the content of a data: URL; RequestError if it is empty or malformed."""
    head, comma, content = url.partition(",")
    if not comma:
        raise RequestError("a data: URL has no comma: write data:image/png;base64,… or data:audio/wav;base64,…")
    content = content.partition("#")[0]
    _, semicolon, last = head.rpartition(";")
    if semicolon and last.strip().lower() == "base64":
        if "%" in content:
            content = unquote_to_bytes(content).decode("latin-1")
        data = decode_base64(content, "a data: URL")
    else:
        data = unquote_to_bytes(content)
    if not data:
        raise RequestError("a data: URL is empty: give its content after the comma")
    return data


def least_bytes(url: str) -> int:
    """Return a lower bound of the size, in bytes, of the content of a data: URL; it may be negative. It is close for
    long base64. It holds unless the URL has a head of more than 80 characters, a fragment, or blanks."""
    num_others = 2 * url.count("%") + url.count("\n") + url.count("\r")  # characters of escapes and line breaks
    return (len(url) - num_others) // 4 * 3 - 64  # less the bytes of the head


def decode_base64(content: str, where: str) -> bytes:
    """Return the bytes of base64, even if it contains white space, lacks padding or has the alphabet for URLs.
    RequestError, about `where`, if it is invalid."""
    try:
        return base64.b64decode(content, validate=True)
    except ValueError:
        bare = "".join(content.translate(_IN_URLS).split()).rstrip("=")
    try:
        return base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
    except ValueError as error:
        raise RequestError(f"{where} is not base64 ({error}): encode the whole file") from None
