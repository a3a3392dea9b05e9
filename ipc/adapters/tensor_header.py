"""The header of adapter_model.safetensors: the place of each tensor.

Format: https://huggingface.co/docs/safetensors. Reads no tensor, and needs neither torch nor safetensors.
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path

import msgspec

from ..errors import RequestError

TENSORS_NAME = "adapter_model.safetensors"
MAX_HEADER_BYTES = 32 << 20  # a tensor takes about 150
SIZE_BY_DTYPE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class TensorPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in the file."""

    name: str
    dtype: str  # a key of SIZE_BY_DTYPE
    shape: tuple[int, ...]
    offset: int  # of the first byte, in the file
    num_bytes: int


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> dict[str, TensorPlace]:
    """Return the tensors of a safetensors file by name, in the order of their bytes; RequestError if it is damaged."""
    try:
        with path.open("rb") as file:
            (num_header_bytes,) = struct.unpack("<Q", file.read(8))
            header = msgspec.json.decode(file.read(num_header_bytes), type=dict[str, msgspec.Raw])
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}): give the folder of a PEFT adapter") from None
    header.pop("__metadata__", None)
    entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    return {
        name: TensorPlace(
            name=name,
            dtype=entry.dtype,
            shape=entry.shape,
            offset=8 + num_header_bytes + entry.data_offsets[0],
            num_bytes=prod(entry.shape) * SIZE_BY_DTYPE[entry.dtype],
        )
        for name, entry in sorted(entries.items(), key=lambda each: each[1].data_offsets)
    }
