"""The digest of an adapter's content, which names it in all processes, in the store and in the keys of its KV blocks.

It covers the tensors and the fields of adapter_config.json that change their meaning. Folders with equal weights and
fields are one adapter.
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
    """Interface of a hashlib object, which digests bytes piece by piece."""

    def update(self, piece: bytes | memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


def begin_digest(folder: Path) -> Digest:
    """Return a digest that covers the config of the adapter in `folder`; the caller adds the bytes of its tensor file.
    RequestError if the config cannot be read; Overloaded if the system is short of something."""
    fields = read_config(folder).canonical_bytes()
    return hashlib.sha256(PREFIX + len(fields).to_bytes(8, "little") + fields)


def adapter_digest(folder: Path, pause: Callable[[], None] = lambda: None, pages: memoryview | None = None) -> bytes:
    """Return the SHA-256 digest of the adapter in `folder`. RequestError if a file cannot be read; Overloaded if the
    system is short of something. `pause` is called between pieces of the work. `pages`: memory from `new_pages` to read
    into; None: new memory."""
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
