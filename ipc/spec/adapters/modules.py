"""Checks of adapters' names, and of the options about adapters. The supervisor checks them before any process starts;
the frontend uses them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...errors import ConfigError, RequestError
from ..config.engine_config import EngineConfig
from ..models.model_config import ModelConfig
from .adapter_file import read_adapter

MAX_NAME_CHARACTERS = 200


class ModuleOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An item of --lora-modules."""

    name: str
    path: str
    base_model_name: str = ""


def check_name(name: str, model_names: Sequence[str]) -> None:
    """Raise RequestError if `name` cannot be an adapter's name, which requests and URLs use in place of a model's."""
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable() or name != name.strip():
        raise RequestError(
            f"lora_name is {name!r:.80}: give 1 to {MAX_NAME_CHARACTERS} printable characters without space around them"
        )
    if {"", ".", ".."}.intersection(name.split("/")) or "\\" in name:
        raise RequestError(f"lora_name is {name!r:.80}: leave out '..' and the like, so that it names no other folder")
    if name in model_names:
        raise RequestError(f"lora_name {name!r} is the name of the model itself: choose another")


def parse_modules(config: EngineConfig, model_names: Sequence[str]) -> list[ModuleOption]:
    """Return the adapters of --lora-modules. ConfigError if an item is malformed, or if its name is invalid, repeated,
    or a name of the model."""
    modules: list[ModuleOption] = []
    for item in config.lora_modules or ():
        try:
            if item.lstrip().startswith("{"):
                module = msgspec.json.decode(item, type=ModuleOption)
            else:
                name, separator, path = item.partition("=")
                if not separator or not path:
                    raise RequestError('give NAME=FOLDER or {"name": …, "path": …}')
                module = ModuleOption(name, path)
            check_name(module.name, model_names)
            if module.base_model_name and module.base_model_name not in model_names:
                names = " or ".join(model_names)
                raise RequestError(f"base_model_name {module.base_model_name!r} is not {names}: leave it out")
            if any(module.name == each.name for each in modules):
                raise RequestError(f"the name {module.name!r} is there twice: choose another for one of them")
        except (RequestError, msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(f"--lora-modules {item:.200}: {error}") from None
        modules.append(module)
    return modules


def check_adapter_options(config: EngineConfig, model: ModelConfig, model_names: Sequence[str]) -> None:
    """Raise ConfigError if options about adapters contradict each other or the model, or if an adapter of
    --lora-modules does not fit the model."""
    given = {
        "--lora-modules": config.lora_modules,
        "--adapter-folder": config.adapter_folder,
        "--allow-runtime-lora": config.allow_runtime_lora,
    }
    if not config.enable_lora:
        if option := next((option for option, value in given.items() if value), None):
            raise ConfigError(f"{option} needs --enable-lora: give both, or neither")
        return
    if model.implementation == "transformers":
        raise ConfigError(
            f"--enable-lora: {model.architecture} runs on transformers' layers, which take no adapters: leave it out, "
            "or merge the adapter into the checkpoint with PEFT"
        )
    if model.cross is not None:
        raise ConfigError(
            f"--enable-lora: {model.architecture} has cross attention, which takes no adapters: leave it out, or merge "
            "the adapter into the checkpoint with PEFT"
        )
    if config.adapter_folder is not None and not Path(config.adapter_folder).is_dir():
        raise ConfigError(f"--adapter-folder {config.adapter_folder} is not a folder: create it, or leave it out")
    if config.allow_runtime_lora and config.adapter_folder is None:
        raise ConfigError(
            "--allow-runtime-lora needs --adapter-folder, the only folder that HTTP requests load from: give it"
        )
    for module in parse_modules(config, model_names):
        try:
            read_adapter(
                Path(module.path), model, max_rank=config.max_lora_rank, target_modules=config.lora_target_modules
            )
        except RequestError as error:
            raise ConfigError(f"--lora-modules {module.name}: {error}") from None
