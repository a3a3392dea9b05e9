"""Headers of a checkpoint's weight files: the file, dtype and size of each tensor.

The files are safetensors, or GGUF with an index. Reads no weights and needs neither torch nor safetensors.
"""

from __future__ import annotations

import json
import os
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ConfigError
from .gguf_index import read_gguf_index

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class StoredTensor(NamedTuple):
    """A tensor's entry in a header."""

    dtype: str  # F32, BF16, I8, Q4_K …
    num_elements: int
    num_bytes: int


def weight_paths(folder: Path) -> list[Path]:
    """Return the weight files in a folder."""
    return sorted([*folder.glob(f"*{SUFFIX}"), *folder.glob("*.gguf")])


def file_by_tensor(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor by name, from the index or the header of the only file; ConfigError if neither is
    usable."""
    indexed = read_gguf_index(folder)
    if indexed is not None:
        return {name: folder / tensor.file for name, tensor in indexed.items()}
    index_file, single_file = folder / INDEX_NAME, folder / SINGLE_NAME
    if index_file.exists():
        return _read_index(index_file)
    if single_file.exists():
        return dict.fromkeys(read_header(single_file), single_file)
    others = sorted(path.name for path in folder.glob("*.bin"))
    mend = (
        "convert it with transformers' save_pretrained"
        if others
        else "is --model the right folder? Of a repository of GGUF files give one as owner/name:Q4_K_M"
    )
    raise ConfigError(
        f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}"
        + (f", only {', '.join(others[:3])}, which may run code when read: " if others else ": ")
        + mend
    )


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors by name; ConfigError if a file is missing, incomplete or unreadable."""
    indexed = read_gguf_index(folder)
    if indexed is not None:
        return {name: StoredTensor(each.kind, each.num_elements, each.num_bytes) for name, each in indexed.items()}
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(set(file_by_tensor(folder).values())):
        tensors |= read_header(path)
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors in the header of a safetensors file by name. ConfigError if the file is missing, unreadable,
    damaged, or smaller than its header says."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            (num_header_bytes,) = struct.unpack("<Q", file.read(8))
            if num_header_bytes > MAX_HEADER_BYTES:
                raise ValueError("its header is too long")
            header = json.loads(file.read(num_header_bytes))
        header.pop("__metadata__", None)
        tensors = {name: _stored(entry) for name, entry in header.items()}
        num_bytes = 8 + num_header_bytes + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist, {INDEX_NAME} lists it: the download is incomplete, fetch the file again"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}: check its permissions") from None
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, error) from None
    if path.stat().st_size < num_bytes:
        raise damaged(path, f"its header says {num_bytes} bytes")
    return tensors


def check_regular(path: Path) -> None:
    """Raise ConfigError if `path` is a pipe, a device, a socket or a folder, which could block when opened."""
    if os.path.exists(path) and not os.path.isfile(path):  # os.path's functions accept any name
        raise ConfigError(f"{path} is no regular file, but a pipe, a device or a folder: replace it by the file")


def damaged(path: Path, reason: object) -> ConfigError:
    """Return the error for a truncated or damaged file."""
    size = path.stat().st_size if path.exists() else 0
    return ConfigError(f"{path} ({size} bytes) is truncated or damaged ({reason}): fetch the file again")


def _stored(entry: dict[str, Any]) -> StoredTensor:
    start, end = entry["data_offsets"]
    return StoredTensor(str(entry["dtype"]), prod(entry["shape"]), end - start)


def _read_index(path: Path) -> dict[str, Path]:
    try:
        names = json.loads(path.read_text(encoding="utf-8-sig"))["weight_map"]
        files = {str(name): str(file) for name, file in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}: {error}): fetch the file again") from None
    for file in sorted(set(files.values())):
        if "/" in file or "\0" in file or not file.endswith(SUFFIX):
            raise ConfigError(
                f"{path} names the file {file!r:.200}: it must be the name of a {SUFFIX} file beside it: fetch the "
                "checkpoint again"
            )
        check_regular(path.parent / file)
    return {name: path.parent / file for name, file in files.items()}
