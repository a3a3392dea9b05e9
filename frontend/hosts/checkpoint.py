"""The checkpoint on each host of an engine: its folder there, and a digest that tells whether it is the same."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ...ipc.config.engine_spec import EngineSpec
from ...ipc.config.weight_files import INDEX_NAME
from ..supervisor.hub import find_checkpoint

_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each weight file, evenly spread: other weights of the same shapes differ


def find_model(spec: EngineSpec) -> Path:
    """Return the folder of the engine's checkpoint on this host: the head's path if it exists, else as --model names
    it, downloaded if need be. ConfigError if there is none."""
    if os.path.isdir(spec.model_folder):
        return Path(spec.model_folder)
    return find_checkpoint(spec.config.model, spec.config.revision, config=spec.config)


def checkpoint_digest(folder: Path) -> str:
    """Return a digest, in hex, of config.json, the index, and of size and samples of each weight file."""
    digest = hashlib.sha256()
    for name in ("config.json", INDEX_NAME):
        path = folder / name
        digest.update(hashlib.sha256(path.read_bytes() if path.exists() else b"").digest())
    for path in sorted(folder.glob("*.safetensors")):
        num_bytes = path.stat().st_size
        digest.update(f"{path.name} {num_bytes}\n".encode())
        with path.open("rb") as file:
            for sample in range(_NUM_SAMPLES):
                file.seek(max(num_bytes - _SAMPLE_BYTES, 0) * sample // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
