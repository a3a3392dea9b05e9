"""The header of adapter_model.safetensors: the place of each tensor.

Format: https://huggingface.co/docs/safetensors. Reads no tensor, and needs neither torch nor safetensors.
"""

from __future__ import annotations

import os
import re
import struct
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from ...errors import RequestError
from ...shortages.failure import shortage_of

TENSORS_NAME = "adapter_model.safetensors"
MAX_HEADER_BYTES = 32 << 20  # a tensor's entry takes about 150
SIZE_BY_DTYPE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")

Size = Annotated[int, Meta(ge=0, le=1 << 50)]


class TensorPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a tensor in the file."""

    name: str
    dtype: str  # a key of SIZE_BY_DTYPE
    shape: tuple[int, ...]
    offset: int  # of the first byte, in the file
    num_bytes: int


class _Entry(msgspec.Struct, frozen=True):
    """A tensor's part of the header. Offsets count from the header's end."""

    dtype: str
    shape: Annotated[tuple[Size, ...], Meta(max_length=8)]
    data_offsets: tuple[Size, Size]


class TensorHeader(NamedTuple):
    """The header of a file, not parsed, and the size of the file."""

    content: bytes
    num_file_bytes: int


def read_header(path: Path) -> dict[str, TensorPlace]:
    """Return the tensors of a safetensors file by name, in the order of their bytes.

    RequestError if the file is missing, unreadable or damaged, holds no tensors or other dtypes than floats, or if the
    tensors' bytes do not fill the file exactly. Overloaded if the system is short of descriptors or memory.
    """
    return parse_header(path, load_header(path))


def load_header(path: Path) -> TensorHeader:
    """Return the unparsed header of a safetensors file. RequestError if the file is missing, unreadable or truncated;
    Overloaded if the system is short of descriptors or memory."""
    if not path.is_file():  # a pipe or a device would block
        raise RequestError(f"{path} cannot be read, it does not exist or is no file: {_mend_of_missing(path.parent)}")
    try:
        with path.open("rb") as file:
            num_file_bytes = os.fstat(file.fileno()).st_size
            start = file.read(8)
            (num_header_bytes,) = struct.unpack("<Q", start) if len(start) == 8 else (0,)
            if not 0 < num_header_bytes <= min(num_file_bytes - 8, MAX_HEADER_BYTES):
                raise _damaged(path, f"its header has {num_header_bytes} bytes, the file {num_file_bytes}")
            return TensorHeader(file.read(num_header_bytes), num_file_bytes)
    except OSError as error:
        refusal = RequestError(f"{path} cannot be read ({error.strerror}): check its permissions")
        raise shortage_of(error, f"{path} cannot be read") or refusal from None


def parse_header(path: Path, header: TensorHeader) -> dict[str, TensorPlace]:
    """Return the tensors of a header by name, in the order of their bytes. RequestError if the header is damaged, has
    no tensors or other dtypes than floats, or if the tensors' bytes do not fill the file exactly. `path`: for
    messages."""
    try:
        fields = msgspec.json.decode(header.content, type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in fields.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, f"its header cannot be read: {error}") from None
    if not entries:
        raise RequestError(f"{path} holds no tensors: save the adapter again with PEFT")
    start = 8 + len(header.content)
    places = [_place(path, name, entry, start) for name, entry in entries.items()]
    places.sort(key=lambda place: (place.offset, place.num_bytes))
    _check_order(path, places, start, header.num_file_bytes)
    return {place.name: place for place in places}


def _place(path: Path, name: str, entry: _Entry, start: int) -> TensorPlace:
    if len(name) > 500 or not NAME.fullmatch(name):
        raise RequestError(f"{path}: {shown(name)} is no path of a tensor: save the adapter again with PEFT")
    size = SIZE_BY_DTYPE.get(entry.dtype)
    if size is None:
        kinds = ", ".join(SIZE_BY_DTYPE)
        raise RequestError(f"{path}: tensor {name} is {shown(entry.dtype)}, an adapter holds {kinds}: convert it")
    first, last = entry.data_offsets
    if last - first != prod(entry.shape) * size:
        expected = f"shape {list(entry.shape)} of {entry.dtype} takes {prod(entry.shape) * size}"
        raise _damaged(path, f"tensor {name} has {last - first} bytes, {expected}")
    return TensorPlace(name=name, dtype=entry.dtype, shape=entry.shape, offset=start + first, num_bytes=last - first)


def _check_order(path: Path, places: list[TensorPlace], start: int, num_file_bytes: int) -> None:
    """Raise RequestError unless the tensors' bytes follow each other from `start` to the end of the file."""
    if places[0].offset != start:
        raise _damaged(path, f"{places[0].offset - start} bytes before tensor {places[0].name} belong to none")
    for place, after in pairwise(places):
        end = place.offset + place.num_bytes
        if end > after.offset:
            raise _damaged(path, f"tensors {place.name} and {after.name} overlap by {end - after.offset} bytes")
        if end < after.offset:
            raise _damaged(path, f"{after.offset - end} bytes before tensor {after.name} belong to none")
    end = places[-1].offset + places[-1].num_bytes
    if end != num_file_bytes:
        raise _damaged(path, f"its tensors end at byte {end}, the file has {num_file_bytes}")


def _mend_of_missing(folder: Path) -> str:
    if (folder / "adapter_model.bin").exists():
        return "adapter_model.bin may run code when read: save the adapter again as safetensors"
    return "give the folder of a PEFT adapter"


def _damaged(path: Path, reason: str) -> RequestError:
    return RequestError(f"{path} is truncated or damaged ({reason}): copy the adapter again")


def shown(value: object) -> str:
    """Return a value from a file for a message: ASCII, at most 120 characters."""
    return ascii(value)[:120]
