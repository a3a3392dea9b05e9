"""The index of a GGUF file's tensors, by the names that config.json's model has for them.

`frontend/gguf/` writes it beside config.json and links to the files; ranks read weights by it and need not know GGUF's
metadata. The formats of blocks are those of ggml (github.com/ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import msgspec

from ..errors import ConfigError

GGUF_INDEX_NAME = "model.gguf.index.json"
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


def read_gguf_index(folder: Path) -> dict[str, GgufTensor] | None:
    """Read the index in a folder; None if it holds no GGUF file."""
    path = folder / GGUF_INDEX_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, GgufTensor])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): remove {folder} and start again") from None
