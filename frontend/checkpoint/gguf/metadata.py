"""Metadata: the values of a GGUF file's keys and small tensors, read with checks."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Never

from ....ipc.errors import ConfigError
from ....ipc.spec.config.gguf_index import GgufTensor
from ....ipc.spec.models.config_file import MAX_SIZE, is_whole
from .end_tokens import END_TOKENS, end_tokens
from .reader import GgufFile


class Metadata:
    """The metadata of a file, read with checks: ConfigError, with the file and the key, if a value is invalid."""

    def __init__(self, file: GgufFile, links: Mapping[str, Path]) -> None:
        """`links`: GgufTensor.file → the file with the tensor."""
        self._file, self.tensors, self._links = file, file.tensors, links
        self.path, self.token_ids = file.path, file.token_ids
        ends = end_tokens(file.token_ids)
        self.end_ids = {file.token_ids[token] for token in ends}
        self.other_ids = {
            file.token_ids[token] for token in END_TOKENS - ends if token in file.token_ids
        }  # tokens that do not end an answer here
        self.architecture = str(file.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `<architecture>.<key>`; for a list of equal values, one per layer, that value."""
        value = self._file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            return value[0]
        return value

    def whole(self, key: str) -> Any:
        """Return the value of `<architecture>.<key>` unchanged; None if the file has none."""
        return self._file.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(f"{self.architecture}.{key} must be a number, it is {value!r:.100}")
        return value

    def known_number(self, key: str) -> float | None:
        """Return the number `<architecture>.<key>`, None if the file has none."""
        return None if self.get(key) is None else self.number(key)

    def count(self, key: str, default: float | None = None, most: int = MAX_SIZE, least: int = 0) -> int:
        value = self.number(key, default)
        if value == 0 < least:
            self.refuse(f"{self.architecture}.{key} must be a whole number of at least {least}, it is 0")
        if not 0 <= value <= most or value != int(value):
            self.refuse(f"{self.architecture}.{key} must be a whole number of at most {most}, it is {value!r:.100}")
        return int(value)

    def token_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self._file.metadata.get(key)
        if value is not None and not (is_whole(value) and -1 <= value <= MAX_SIZE):
            self.refuse(f"{key} must be the id of a token, it is {value!r:.100}")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outputs first; ConfigError if the file has none of this name."""
        if tensor not in self.tensors:
            self.refuse(f"tensor {tensor} is missing, among {len(self.tensors)}: fetch the file again")
        return self.tensors[tensor].shape

    def floats(self, name: str) -> list[float]:
        """Return the elements of a small tensor."""
        tensor: GgufTensor = self.tensors[name]
        if tensor.kind != "F32" or tensor.num_elements > 1 << 16:
            self.refuse(f"tensor {name} is {tensor.kind} {list(tensor.shape)}, floats of 32 bits are expected")
        with self._links[tensor.file].open("rb") as file:
            file.seek(tensor.offset)
            return list(struct.unpack(f"<{tensor.num_elements}f", file.read(tensor.num_bytes)))

    def refuse(self, reason: str) -> Never:
        raise ConfigError(f"{self._file.path}: {reason}")
