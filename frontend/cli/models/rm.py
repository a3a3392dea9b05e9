"""`engine-launch rm MODEL`: removes a model from the hub's cache, after a question."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from ....ipc.errors import ConfigError
from ....ipc.process.machine_memory import gib
from ....ipc.spec.config.engine_config import EngineConfig
from ...checkpoint.downloads.cached import CachedRepository
from ...checkpoint.downloads.hub_name import HubName, parse_hub_name
from ...checkpoint.downloads.listing import CachedModel, cached_model, cached_models, remove_files, remove_repository
from ...launcher.engine_record import EngineRecord, running_engines
from ..engines import StandardTerminal, Terminal
from .hub_options import FORMS, add_hub_options, hub_config, model_named

DESCRIPTION = (
    "Remove a model from the hub's cache: owner/name with all its files, owner/name:TAG one GGUF file of it.\n"
    "A file or folder that is named by its path is never removed."
)
EXAMPLES = ["Qwen/Qwen3-0.6B", "bartowski/Qwen3-8B-GGUF:Q4_K_M --yes"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=FORMS)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    add_hub_options(parser)


def run(arguments: argparse.Namespace) -> int:
    path, name = model_named(arguments.model)
    config = hub_config(arguments)
    if name is None:
        kind = "-r " if path is not None and path.is_dir() else ""
        raise ConfigError(
            f"{path} is not in the hub's cache, so it stays: rm {kind}{shlex.quote(str(path))} removes it"
        )
    check_unused(name, running_engines())
    models = meant(name, config)
    if not models:
        place = CachedRepository(name.repository, config)
        raise ConfigError(f"{arguments.model} is not in {place.cache}: engine-launch ls shows what is")
    if not arguments.yes and not confirmed(models, StandardTerminal()):
        print("nothing was removed")
        return 1
    rest = [each for each in cached_models(config) if each.name.repository == name.repository and each not in models]
    num_bytes = remove_files(models[0], config) if rest else remove_repository(name.repository, config)
    print(f"removed {name}: {gib(num_bytes)}")
    return 0


def meant(name: HubName, config: EngineConfig) -> list[CachedModel]:
    """Return the models in the cache that are to go: the GGUF file of a tag, or all of a repository."""
    if name.part is None:
        return [model for model in cached_models(config) if model.name.repository == name.repository]
    found = cached_model(name, config)
    return [] if found is None else [found]


def check_unused(name: HubName, engines: Sequence[EngineRecord]) -> None:
    """Raise ConfigError if an engine of this user serves a model of the repository: it may have to load it again."""
    for engine in engines:
        served = None if engine.given_model is None else parse_hub_name(engine.given_model)
        if served is not None and served.repository == name.repository:
            raise ConfigError(f"the engine with pid {engine.pid} serves {engine.given_model}: stop it first")


def confirmed(models: Sequence[CachedModel], terminal: Terminal) -> bool:
    """Ask whether the models are to be removed. ConfigError if there is nobody to ask."""
    shown = ", ".join(f"{model.name} ({gib(model.num_bytes)})" for model in models)
    if not terminal.is_person:
        raise ConfigError(f"there is nobody to ask whether {shown} is to be removed: give --yes")
    return terminal.ask(f"remove {shown} from the cache? [y/N] ").strip().lower() in ("y", "yes")
