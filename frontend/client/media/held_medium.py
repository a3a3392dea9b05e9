"""HeldMedium: an image of a request as its caller gives it, with its bytes in this process.

Paths and bytes go to the engine as they are; a PIL image as PNG. Pillow is not imported: who has a PIL image has it.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from ....ipc.errors import RequestError
from ....ipc.messages.client import Medium
from ....ipc.sockets import MAX_CLIENT_MESSAGE_BYTES
from .data_url import decode_data_url

Detail: TypeAlias = Literal["", "auto", "low", "high"]

MAX_BYTES = MAX_CLIENT_MESSAGE_BYTES - 4096  # of a medium: it is one frame
PNG_MODES = ("1", "I", "I;16", "L", "LA", "P", "RGB", "RGBA")
FORMS = "an image is a PIL image, bytes of a file, a path, or a data:, http(s): or file: URL"


class HeldMedium(Medium, frozen=True, kw_only=True, dict=True):
    """A medium whose bytes are `data`; they are no field, so that no message of this medium contains them."""

    @property
    def data(self) -> bytes:
        return cast("bytes", self.__dict__["data"])


def to_medium(image: object, *, uuid: str = "", detail: Detail = "") -> Medium:
    """Return the medium of an image in any form; RequestError if it has none of them, or cannot be read."""
    if isinstance(image, Medium):
        return image
    if image is None:
        if not uuid:
            raise RequestError(f"an image is None and has no uuid: {FORMS}")
        return Medium(uuid=uuid, detail=detail)
    if isinstance(image, str) and image[:5].lower() in ("http:", "https", "file:"):
        return Medium(url=image, uuid=uuid, detail=detail)
    data = _bytes_of(image)
    if not data:
        raise RequestError("an image has no bytes: give the content of its file")
    if len(data) > MAX_BYTES:
        raise RequestError(f"an image has {len(data)} bytes, at most {MAX_BYTES} can be sent: use a smaller one")
    medium = HeldMedium(digest=hashlib.sha256(data).digest(), uuid=uuid, detail=detail)
    medium.__dict__["data"] = data
    return medium


def _bytes_of(image: object) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str) and image[:5].lower() == "data:":
        return decode_data_url(image)
    if isinstance(image, str | os.PathLike):
        path = Path(image)
        try:
            return path.read_bytes()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it is no path"
            raise RequestError(f"the image {str(path)!r:.200} cannot be read: {why}") from None
    if type(image).__module__.startswith("PIL.") or hasattr(image, "_repr_png_"):
        return _png(image)
    raise RequestError(f"an image is of type {type(image).__name__}: {FORMS}")


def _png(image: Any) -> bytes:
    """Encode a PIL image; the modes that PNG does not know become RGB, as they do before a model sees them."""
    buffer = io.BytesIO()
    try:
        (image if image.mode in PNG_MODES else image.convert("RGB")).save(buffer, "PNG", compress_level=1)
    except (OSError, ValueError, AttributeError) as error:
        raise RequestError(f"a PIL image cannot be encoded: {error}") from None
    return buffer.getvalue()
