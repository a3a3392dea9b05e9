"""The digest of an adapter's content, which names it in all processes, in the store and in the keys of its KV blocks.

It covers the tensors and those fields of adapter_config.json that change their meaning: two trainings that wrote the
same weights are one adapter, wherever their folders lie.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..errors import RequestError
from .adapter_config import read_config
from .tensor_header import TENSORS_NAME

PREFIX = b"tokenloom-adapter-1"
PIECE_BYTES = 1 << 20


def adapter_digest(folder: Path) -> bytes:
    """Return SHA-256 of the adapter in `folder`; RequestError if a file cannot be read."""
    fields = read_config(folder).canonical_bytes()
    content = hashlib.sha256(PREFIX + len(fields).to_bytes(8, "little") + fields)
    path = folder / TENSORS_NAME
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                content.update(piece)
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from None
    return content.digest()
