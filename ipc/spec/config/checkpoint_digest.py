"""Digests of a checkpoint's files, which show whether two machines have the same checkpoint."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .gguf_index import GGUF_INDEX_NAME
from .weight_files import INDEX_NAME, weight_paths

_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096  # per weight file, evenly spread: show other weights of equal shapes
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
)


def checkpoint_digest(folder: Path) -> str:
    """Return a digest, in hex, of config.json, of the index, and of the name, size and samples of each weight file."""
    digest = hashlib.sha256()
    index_name = GGUF_INDEX_NAME if (folder / GGUF_INDEX_NAME).exists() else INDEX_NAME
    for name in ("config.json", index_name):
        path = folder / name
        digest.update(hashlib.sha256(path.read_bytes() if path.exists() else b"").digest())
    for path in weight_paths(folder):
        num_bytes = path.stat().st_size
        digest.update(f"{path.name} {num_bytes}\n".encode())
        with path.open("rb") as file:
            for sample in range(_NUM_SAMPLES):
                file.seek(max(num_bytes - _SAMPLE_BYTES, 0) * sample // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def tokenizer_digest(folder: Path) -> str:
    """Return a digest, in hex, of the files that tokenizers are read from."""
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        path = folder / name
        digest.update(hashlib.sha256(path.read_bytes() if path.exists() else b"").digest())
    return digest.hexdigest()
