"""Decode data: URLs (RFC 2397). Errors never show the content."""

from __future__ import annotations

import base64
import binascii
from urllib.parse import unquote_to_bytes

from ....ipc.errors import RequestError


def decode_data_url(url: str) -> bytes:
    """Return the content of a data: URL; RequestError if it is empty or malformed."""
    head, comma, content = url.partition(",")
    if not comma:
        raise RequestError("a data: URL has no comma: write data:image/png;base64,… or data:audio/wav;base64,…")
    is_base64 = head.endswith(";base64")
    data = decode_base64(content, "a data: URL") if is_base64 else unquote_to_bytes(content)
    if not data:
        raise RequestError("a data: URL is empty: give its content after the comma")
    return data


def decode_base64(content: str, where: str) -> bytes:
    """Decode base64, also with white space in it or of the alphabet for URLs; RequestError names `where`."""
    if "-" in content or "_" in content:
        content = content.translate({ord("-"): "+", ord("_"): "/"})
    try:
        return base64.b64decode(content, validate=True)
    except ValueError:
        pass
    try:
        return base64.b64decode("".join(content.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{where} is not base64 ({error}): encode the whole file") from None
