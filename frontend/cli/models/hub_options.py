"""Options of the commands that use the hub and its cache, and the models that their arguments name."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NamedTuple

from ....ipc.errors import ConfigError
from ....ipc.spec.config.engine_config import EngineConfig
from ...checkpoint.downloads.hub_name import HubName, not_of_the_hub, parse_hub_name
from ...checkpoint.downloads.repository import is_offline

FORMS = "owner/name, owner/name:Q4_K_M, hf.co/owner/name"


class ModelPlace(NamedTuple):
    """What a person named: a path that exists, or else a model of the hub."""

    path: Path | None
    name: HubName | None


def add_hub_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hub")
    group.add_argument("--download-dir", metavar="FOLDER", help="the cache (default: the hub's, as HF_HUB_CACHE says)")
    group.add_argument("--hf-token", metavar="KEY", help="the hub's key for private repositories (default: HF_TOKEN)")


def hub_config(arguments: argparse.Namespace) -> EngineConfig:
    """Return the configuration with which an engine would find the same models."""
    return EngineConfig(download_dir=arguments.download_dir, hf_token=arguments.hf_token)


def check_online() -> None:
    """Raise ConfigError if HF_HUB_OFFLINE forbids to ask the hub."""
    if is_offline():
        raise ConfigError("HF_HUB_OFFLINE forbids to ask the hub: unset it; engine-launch ls shows what is here")


def model_named(text: str) -> ModelPlace:
    """Return what `text` names. ConfigError if it is neither a path that exists nor a name of the hub."""
    if os.path.exists(text):
        return ModelPlace(Path(text), None)
    name = parse_hub_name(text)
    if name is not None and (name.part is not None or not name.repository.endswith(".gguf")):
        return ModelPlace(None, name)
    if text.endswith(".gguf"):
        raise ConfigError(f"{text}: there is no such file")
    raise ConfigError(not_of_the_hub(text) or f"{text} is neither a path nor a model of the hub: {FORMS}")
