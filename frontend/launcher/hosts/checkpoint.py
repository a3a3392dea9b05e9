"""The checkpoint on each host of an engine: its folder there."""

from __future__ import annotations

import os
from pathlib import Path

from ....ipc.spec.config.engine_spec import EngineSpec
from ...checkpoint.hub import find_checkpoint


def find_model(spec: EngineSpec) -> Path:
    """Return the folder of the engine's checkpoint on this host: the head's path if it exists, else as --model names
    it, downloaded if need be. ConfigError if there is none."""
    if os.path.isdir(spec.model_folder):
        return Path(spec.model_folder)
    return find_checkpoint(spec.config.model, spec.config.revision, config=spec.config)
