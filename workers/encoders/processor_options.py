"""Options of a checkpoint's processor of images or audio, from the file that transformers prefers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...ipc.errors import ConfigError
from ...ipc.spec.models.config_file import read_json


def processor_options(folder: Path, part: str, purpose: str) -> dict[str, Any]:
    """Return the object `part` of processor_config.json or, if there is none, preprocessor_config.json. ConfigError if
    there is neither; its message gives the `purpose` of the options."""
    for name, field in (("processor_config.json", part), ("preprocessor_config.json", "")):
        if (folder / name).exists():
            content = read_json(folder / name)
            options = content.get(field) if field else content
            if isinstance(options, dict):
                return options
    raise ConfigError(f"{folder} has no preprocessor_config.json, which says {purpose}: fetch it, too")
