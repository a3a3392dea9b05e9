"""The index of a GGUF file's tensors, by the names that config.json's model has for them.

`frontend/checkpoint/gguf/` writes it beside config.json and links to the files; ranks read weights by it and need not
know GGUF's metadata. The formats of blocks are those of ggml (github.com/ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import msgspec

from ...errors import ConfigError
from ...shortages.failure import shortage_of

GGUF_INDEX_NAME = "model.gguf.index.json"
GGUF_STATUS_NAME = "model.gguf.status.json"  # size and time of each file when the index was made
BLOCKS = {  # of each format: elements, bytes
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
}

# Bits of a code, of formats with blocks that stay codes where these are multiplied as integers. Others get 8 bits.
CODE_BITS = {
    "Q8_0": 8,
    "Q5_0": 8,
    "Q4_0": 4,
    "Q4_1": 4,
    "Q4_K": 4,
    "IQ4_NL": 4,
    "IQ4_XS": 4,
    "MXFP4": 4,
}


class GgufTensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a tensor lies, and how it differs from the one that its name stands for."""

    file: str  # name of a link in the folder of the index
    kind: str  # of BLOCKS
    shape: tuple[int, ...]  # outputs first, as in safetensors
    offset: int  # in the file, in bytes
    rotated: int = 0  # rows of a head whose rotary halves alternate; 0: in order
    added: float = 0.0  # to each element

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        elements, size = BLOCKS[self.kind]
        return self.num_elements // elements * size


def gguf_status(path: Path) -> tuple[int, int]:
    """Return the size and the time of a file, by which the index knows it again."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def check_unchanged(path: Path) -> None:
    """Raise ConfigError if a file in the folder of an index is gone, or another than the one that was indexed."""
    try:
        known = msgspec.json.decode((path.parent / GGUF_STATUS_NAME).read_bytes(), type=dict[str, tuple[int, int]])
        if known.get(path.name) == gguf_status(path):
            return
    except (OSError, msgspec.DecodeError) as error:
        what = f"{path.resolve()} cannot be read"
        raise shortage_of(error, what) or ConfigError(f"{what} ({error}): is the GGUF file still there?") from None
    raise ConfigError(f"{path.resolve()} has changed since the engine's start: start it again, or put the file back")


def read_gguf_index(folder: Path) -> dict[str, GgufTensor] | None:
    """Read the index in a folder; None if it holds no GGUF file."""
    path = folder / GGUF_INDEX_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, GgufTensor])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        refusal = ConfigError(f"{path} cannot be read ({error}): remove {folder} and start again")
        raise shortage_of(error, f"{path} cannot be read") or refusal from None
