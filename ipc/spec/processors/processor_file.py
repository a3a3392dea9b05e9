"""The file with the settings of a checkpoint's processor of images or audio."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from ...errors import ConfigError
from ..models.config_file import read_json

PART = {"image_processor": "image processor", "feature_extractor": "feature extractor of audio"}


def read_processor(folder: Path, name: Literal["image_processor", "feature_extractor"]) -> dict[str, Any]:
    """Return the settings of a processor: nested in processor_config.json, or preprocessor_config.json; ConfigError if
    the checkpoint has neither."""
    nested = read_object(folder / "processor_config.json").get(name)
    if isinstance(nested, dict):
        return nested
    path = folder / "preprocessor_config.json"
    if not path.exists():
        raise ConfigError(f"{folder} has no {PART[name]}: add the model's preprocessor_config.json")
    return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, empty if there is no file; ConfigError if it cannot be read."""
    return read_json(path) if os.path.lexists(path) else {}
