"""The index of the tensors in GGUF files, by the names that the model of config.json has for them.

`frontend/checkpoint/gguf/` writes it into a folder with config.json and links to the files: those of the model and, if
it takes media, that of its encoder. Ranks read weights by the index and need not know GGUF's metadata. The formats of
blocks are those of ggml (github.com/ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import msgspec

from ...errors import ConfigError
from ...shortages.failure import shortage_of

GGUF_INDEX_NAME = "model.gguf.index.json"
MMPROJ_LINK = "mmproj.gguf"  # name of the link to the file with the encoder of media; sorts after those of the model
GGUF_STATUS_NAME = "model.gguf.status.json"  # size and time of each file when the index was made
BLOCKS = {  # format → elements of a block, bytes of a block
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
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "NVFP4": (64, 36),
}

FLOAT_KINDS = ("F32", "F16", "BF16")
# Bits of a weight in memory, with its share of scales and mins, if weights are multiplied as integers.
KEPT_BITS = {
    **dict.fromkeys(BLOCKS.keys() - set(FLOAT_KINDS), 8.5),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "MXFP4"), 4.5),
    "Q3_K": 4.5625,
    **dict.fromkeys(("Q2_K", "Q4_K"), 4.625),
    "Q4_0": 4.75,
    "Q4_1": 5.0,
    "Q5_K": 5.625,
    "Q5_0": 5.75,
    "Q5_1": 6.0,
    "Q6_K": 6.5625,
}

# Formats that are kept without any rounding if weights are multiplied as integers. A head in another one gets int8
# codes with a scale for each row.
EXACT_KINDS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)

# Bits of a code, for the formats whose codes can be read in plain torch, where they cannot be packed from their blocks;
# others are rounded to 8 bits.
CODE_BITS = {
    "Q8_0": 8,
    **dict.fromkeys(("Q5_0", "IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"), 8),
    "Q4_0": 4,
    "Q4_1": 4,
    "Q4_K": 4,
    "IQ4_NL": 4,
    "IQ4_XS": 4,
    "MXFP4": 4,
}


class GgufTensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The place of a tensor, and how it differs from the model's tensor of this name. Matrices are [out, in] in all
    models; fused ones have all queries, then all keys, then all values."""

    file: str  # name of a link in the folder of the index
    kind: str  # a key of BLOCKS
    shape: tuple[int, ...]  # outputs first, as in safetensors
    offset: int  # in the file, in bytes
    rotated: int = 0  # rows of a head, if the two rotary halves of heads alternate; 0: they are in order
    grouped: tuple[int, int] = (
        0,
        0,
    )  # query and KV heads, if the model has for each KV head its queries, key and value
    added: float = 0.0  # is to be added to each element
    is_decay: bool = False  # the elements are -exp(x) of the model's elements x
    parts: tuple[GgufTensor, ...] = ()  # tensors that make it up along `axis`; `file` and `kind` are the first one's
    axis: int = 0

    def reshaped(self, shape: tuple[int, ...]) -> GgufTensor:
        """Return the tensor with another shape of as many elements."""
        return self if shape == self.shape else msgspec.structs.replace(self, shape=shape)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        elements, size = BLOCKS[self.kind]
        return self.num_elements // elements * size


def gguf_status(path: Path) -> tuple[int, int]:
    """Return the size and modification time (ns) of a file, by which a change of it is detected."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def check_unchanged(path: Path) -> None:
    """Raise ConfigError if a file in the folder of an index is gone or has changed since it was indexed; Overloaded if
    the system is short of descriptors or memory."""
    try:
        known = msgspec.json.decode((path.parent / GGUF_STATUS_NAME).read_bytes(), type=dict[str, tuple[int, int]])
        if known.get(path.name) == gguf_status(path):
            return
    except (OSError, msgspec.DecodeError) as error:
        what = f"{path.resolve()} cannot be read"
        raise shortage_of(error, what) or ConfigError(f"{what} ({error}): is the GGUF file still there?") from None
    raise ConfigError(f"{path.resolve()} has changed since the engine's start: start it again, or put the file back")


def read_gguf_index(folder: Path) -> dict[str, GgufTensor] | None:
    """Read the index in a folder; None if there is none. ConfigError if it cannot be read, Overloaded if the system is
    short of descriptors or memory."""
    path = folder / GGUF_INDEX_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, GgufTensor])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        refusal = ConfigError(f"{path} cannot be read ({error}): remove {folder} and start again")
        raise shortage_of(error, f"{path} cannot be read") or refusal from None
