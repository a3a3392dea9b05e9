"""The digest of an adapter's content, which names it in all processes, in the store and in the keys of its KV blocks.

It covers the tensors and those fields of adapter_config.json that change their meaning: two trainings that wrote the
same weights are one adapter, wherever their folders lie.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ...errors import RequestError
from ...process.page_file import WINDOW_BYTES, PageFile, new_pages
from ...shortages.failure import shortage_of
from .adapter_config import read_config
from .tensor_header import TENSORS_NAME

PREFIX = b"tokenloom-adapter-1"
PIECE_BYTES = 1 << 20  # takes half a millisecond


class Digest(Protocol):
    """A digest of bytes that are given piece by piece."""

    def update(self, piece: bytes | memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


def begin_digest(folder: Path) -> Digest:
    """Return the digest of the adapter in `folder` without the bytes of its tensors' file, which are to be added."""
    fields = read_config(folder).canonical_bytes()
    return hashlib.sha256(PREFIX + len(fields).to_bytes(8, "little") + fields)


def adapter_digest(folder: Path, pause: Callable[[], None] = lambda: None, pages: memoryview | None = None) -> bytes:
    """Return SHA-256 of the adapter in `folder`; RequestError if a file cannot be read. `pause` is called between
    pieces of the work. `pages`: memory to use, of `new_pages`."""
    content = begin_digest(folder)
    path, piece, offset = folder / TENSORS_NAME, (pages or new_pages(WINDOW_BYTES))[:PIECE_BYTES], 0
    try:
        with PageFile(path) as file:
            while count := file.read(piece, offset):
                content.update(piece[:count])
                offset += count
                pause()
    except OSError as error:
        refusal = RequestError(f"{path} cannot be read ({error.strerror}): check the path and its permissions")
        raise shortage_of(error, f"{path} cannot be read") or refusal from None
    return content.digest()
