"""HeldMedium: a medium of a request as its caller gives it, with its bytes in this process.

The engine gets the content of files and bytes unchanged, a PIL image as PNG, and samples as WAV. Pillow and numpy are
not imported: a caller with a PIL image or an array has imported them.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from ....ipc.errors import RequestError
from ....ipc.messages.client import Medium
from ....ipc.messages.media import A_MEDIUM, MEDIUM, MediaKind
from ....ipc.sockets.zmq_sockets import MAX_CLIENT_MESSAGE_BYTES
from .data_url import decode_data_url, is_data_url
from .wav_writer import wav_of

Detail: TypeAlias = Literal["", "auto", "low", "high"]

MAX_BYTES = MAX_CLIENT_MESSAGE_BYTES - 4096  # largest medium: it is sent in one frame
PNG_MODES = ("1", "I", "I;16", "L", "LA", "P", "RGB", "RGBA")
FORMS: dict[MediaKind, str] = {
    "image": "an image is a PIL image, bytes of a file, a path, or a data:, http(s): or file: URL",
    "audio": "an audio clip is (samples, rate), bytes of a file, a path, or a data:, http(s): or file: URL",
}


class HeldMedium(Medium, frozen=True, kw_only=True, dict=True):
    """A medium with its bytes, `data`. They are not a field of the struct, so messages with this medium omit them."""

    @property
    def data(self) -> bytes:
        return cast("bytes", self.__dict__["data"])


def to_medium(given: object, kind: MediaKind, *, uuid: str = "", detail: Detail = "") -> Medium:
    """Return the medium for an image or a clip in any of the FORMS; a Medium is returned unchanged. A URL to fetch is
    not fetched here. None with a `uuid` stands for the medium that an earlier request sent under it. RequestError if
    the medium has another form, is empty or too large, or cannot be read."""
    if isinstance(given, Medium):
        return given
    if given is None:
        if not uuid:
            raise RequestError(f"{A_MEDIUM[kind]} is None and has no uuid: {FORMS[kind]}")
        return Medium(kind=kind, uuid=uuid, detail=detail)
    if isinstance(given, str) and given[:5].lower() in ("http:", "https", "file:"):
        return Medium(kind=kind, url=given, uuid=uuid, detail=detail)
    data = bytes_of(given, kind)
    if not data:
        raise RequestError(f"{A_MEDIUM[kind]} has no bytes: give the content of its file")
    if len(data) > MAX_BYTES:
        raise RequestError(
            f"{A_MEDIUM[kind]} has {len(data)} bytes, at most {MAX_BYTES} can be sent: use a smaller one"
        )
    medium = HeldMedium(kind=kind, digest=hashlib.sha256(data).digest(), uuid=uuid, detail=detail)
    medium.__dict__["data"] = data
    return medium


def bytes_of(given: object, kind: MediaKind) -> bytes:
    """Return the bytes of a medium in any of the FORMS but a URL to fetch. RequestError if it has another form or
    cannot be read."""
    if isinstance(given, bytes):
        return given
    if isinstance(given, bytearray | memoryview):
        return bytes(given)
    if isinstance(given, str) and is_data_url(given):
        return decode_data_url(given)
    if isinstance(given, str | os.PathLike):
        path = Path(given)
        try:
            return path.read_bytes()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it is no path"
            raise RequestError(f"the {MEDIUM[kind]} {str(path)!r:.200} cannot be read: {why}") from None
    if kind == "image" and (type(given).__module__.startswith("PIL.") or hasattr(given, "_repr_png_")):
        return _png(given)
    if kind == "audio" and isinstance(given, Mapping) and given.keys() >= {"array", "sampling_rate"}:  # from `datasets`
        return wav_of(given["array"], given["sampling_rate"])
    if kind == "audio" and isinstance(given, tuple) and len(given) == 2:
        return wav_of(*given)
    rate = ", without its rate" if kind == "audio" and hasattr(given, "dtype") else ""
    raise RequestError(f"{A_MEDIUM[kind]} is of type {type(given).__name__}{rate}: {FORMS[kind]}")


def _png(image: Any) -> bytes:
    """Return a PIL image as PNG. An image in a mode that PNG lacks is converted to RGB, as the engine would do anyway.
    RequestError if Pillow fails."""
    buffer = io.BytesIO()
    try:
        (image if image.mode in PNG_MODES else image.convert("RGB")).save(buffer, "PNG", compress_level=1)
    except (OSError, ValueError, AttributeError) as error:
        raise RequestError(f"a PIL image cannot be encoded: {error}") from None
    return buffer.getvalue()
