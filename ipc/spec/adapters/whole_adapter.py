"""WholeAdapter: an adapter's files as one blob, with the digest of the adapter as its SHA-256.

    "tokenloom-adapter-1" | uint64: length of the fields | fields as JSON | the tensors' file

A receiver on another host can therefore check the blob by the digest that names the adapter.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ...errors import RequestError
from ...shortages.failure import shortage_of
from .adapter_config import CONFIG_NAME, AdapterConfig, read_config
from .digest import PREFIX
from .tensor_header import TENSORS_NAME

PIECE_BYTES = 1 << 20
_HEAD_BYTES = len(PREFIX) + 8


class WholeAdapter:
    """An adapter as one blob, read by `len` and by slices. The head is in memory; slices of the tensors' file are read
    when they are requested, through a descriptor that stays open."""

    def __init__(self, folder: Path) -> None:
        """Open the adapter in `folder`. RequestError if it cannot be read, Overloaded if the system is short of
        descriptors or memory."""
        fields = read_config(folder).canonical_bytes()
        self._head = PREFIX + len(fields).to_bytes(8, "little") + fields
        try:
            self._fd = os.open(folder / TENSORS_NAME, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            what = f"{folder / TENSORS_NAME} cannot be read"
            raise shortage_of(error, what) or RequestError(f"{what}: {error.strerror}") from None
        weakref.finalize(self, os.close, self._fd)
        self._size = os.fstat(self._fd).st_size

    def __len__(self) -> int:
        return len(self._head) + self._size

    def __getitem__(self, place: slice) -> bytes:
        start, stop, _ = place.indices(len(self))
        begin = len(self._head)
        tensors = os.pread(self._fd, max(stop - max(start, begin), 0), max(start - begin, 0))
        return self._head[start:stop] + tensors


def unpack(content: memoryview, folder: Path, pause: Callable[[], None]) -> None:
    """Write the files of a whole adapter, the blob `content`, to an empty folder. `pause` is called between pieces of
    the work. RequestError if the blob's head is damaged; its tensors are not checked."""
    end = _HEAD_BYTES + int.from_bytes(content[len(PREFIX) : _HEAD_BYTES], "little")
    try:
        if content[: len(PREFIX)] != PREFIX:
            raise ValueError("it has another beginning")
        config = msgspec.json.decode(content[_HEAD_BYTES:end], type=AdapterConfig)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RequestError(f"an adapter of {len(content)} bytes from the head is damaged: {error}") from None
    fields: dict[str, Any] = {"peft_type": "LORA", **msgspec.to_builtins(config)}
    (folder / CONFIG_NAME).write_bytes(msgspec.json.encode(fields))
    with (folder / TENSORS_NAME).open("wb", buffering=0) as file:
        for start in range(end, len(content), PIECE_BYTES):
            file.write(content[start : start + PIECE_BYTES])
            pause()
