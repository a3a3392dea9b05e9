"""GgufFile: the metadata and the tensors' places of a GGUF file, version 2 or 3 (ggml-org/ggml, docs/gguf.md).

Reads no weights. Long arrays, such as a vocabulary, are skipped unless they are requested.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from ....ipc.errors import ConfigError
from ....ipc.spec.config.gguf_index import BLOCKS, GgufTensor
from ....ipc.spec.config.weight_files import damaged

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = 32  # alignment of tensors in bytes, unless the metadata have another
MAX_KEPT = 4096  # most elements of an array that is kept
STRING, ARRAY = 8, 9
VOCABULARY = "tokenizer.ggml.tokens"
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
KINDS = {  # number in ggml_type → format
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
UNSUPPORTED = {  # the same of formats that are not read
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
}


@dataclass
class GgufFile:
    """The header of a GGUF file. For the vocabulary and for arrays of more than MAX_KEPT elements, `metadata` has only
    the length, unless the whole array was requested."""

    path: Path
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, GgufTensor] = field(default_factory=dict)
    token_ids: dict[str, int] = field(default_factory=dict)  # ids of the requested tokens


def read_gguf(
    path: Path, link: str, tokens: frozenset[str] = frozenset(), whole: frozenset[str] = frozenset()
) -> GgufFile:
    """Return the header of a file. `link`: the name of the file in its tensors; `tokens`: tokens to find the ids of;
    `whole`: names of arrays to read completely. ConfigError if the file is missing, damaged or truncated, or has a
    tensor in a format that is not supported."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != MAGIC:
                raise ConfigError(f"{path} is no GGUF file: it begins with {data[:4]!r}")
            return _Header(path, data).read(link, {token.encode(): token for token in tokens}, whole)
    except ConfigError:
        raise
    except (struct.error, ValueError, LookupError, MemoryError, OverflowError, RecursionError) as error:
        raise damaged(path, error) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


class _Header:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, len(MAGIC)

    def read(self, link: str, tokens: dict[bytes, str], whole: frozenset[str]) -> GgufFile:
        (version,) = self._take("I")
        if version not in VERSIONS:
            raise ConfigError(
                f"{self._path}: version {version} of GGUF is not supported, known are {VERSIONS}, least byte first"
            )
        num_tensors, num_pairs = self._take("QQ")
        found = GgufFile(self._path)
        for _ in range(num_pairs):
            name = self._string()
            (kind,) = self._take("I")
            if name in whole and kind == ARRAY:
                found.metadata[name] = self._whole(*self._take("IQ"))
            elif name == VOCABULARY and kind == ARRAY:
                kind, count = self._take("IQ")
                found.metadata[name] = count
                texts = enumerate(self._texts(count) if kind == STRING else ())
                found.token_ids = {tokens[text]: i for i, text in texts if text in tokens}
            else:
                found.metadata[name] = self._value(kind)
        tensors = dict(self._tensor(link) for _ in range(num_tensors))
        alignment = found.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        for name, each in tensors.items():
            tensor = GgufTensor(file=link, kind=each.kind, shape=each.shape, offset=begin + each.offset)
            if tensor.offset % 4 or tensor.offset + tensor.num_bytes > len(self._data):
                raise ValueError(f"tensor {name} at bytes {tensor.offset} to {tensor.offset + tensor.num_bytes}")
            found.tensors[name] = tensor
        return found

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def _string(self) -> str:
        (size,) = self._take("Q")
        begin, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError(f"a text of {size} bytes at byte {begin}")
        return self._data[begin : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._take(NUMBERS[kind])[0]
        kind, count = self._take("IQ")
        if count <= MAX_KEPT:
            return [self._value(kind) for _ in range(count)]
        if kind in NUMBERS:
            self._at += count * struct.calcsize(NUMBERS[kind])
        else:
            for _ in self._texts(count):
                pass
        return count

    def _whole(self, kind: int, count: int) -> list[Any]:
        if kind == STRING:
            return [text.decode("utf-8", "replace") for text in self._texts(count)]
        return list(self._take(f"{count}{NUMBERS[kind]}"))

    def _texts(self, count: int) -> Iterator[bytes]:
        for _ in range(count):
            (size,) = struct.unpack_from("<Q", self._data, self._at)
            begin, self._at = self._at + 8, self._at + 8 + size
            yield self._data[begin : self._at]

    def _tensor(self, link: str) -> tuple[str, GgufTensor]:
        name = self._string()
        (num_axes,) = self._take("I")
        shape = self._take(f"{num_axes}Q")[::-1]
        kind, offset = self._take("IQ")
        if kind not in KINDS:
            known = ", ".join(BLOCKS)
            what = f"{kind}, {UNSUPPORTED[kind]}," if kind in UNSUPPORTED else f"{kind}"
            raise ConfigError(
                f"{self._path}: tensor {name!r:.100} has format {what} which is not supported, known are {known}"
            )
        if not shape or 0 in shape:
            raise ValueError(f"tensor {name} of shape {shape}")
        if prod(shape) % BLOCKS[KINDS[kind]][0] or (shape and shape[-1] % BLOCKS[KINDS[kind]][0]):
            raise ValueError(f"tensor {name} of shape {shape} in {KINDS[kind]}")
        return name, GgufTensor(file=link, kind=KINDS[kind], shape=shape, offset=offset)
