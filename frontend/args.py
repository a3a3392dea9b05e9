"""The command line and the YAML file, made from the fields of EngineConfig.

A flag is a field's name with dashes; a field that is true or false also has a `--no-` form. Values given on the
command line win over those of the file.
"""

from __future__ import annotations

import argparse
import os
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ..ipc.config import API_KEY_VARIABLE, EngineConfig
from ..ipc.errors import ConfigError
from .engine_options import NAMES, config_from_options

ALIASES = {"tensor_parallel_size": ["--tp"], "listen": ["--address"]}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per field of EngineConfig; what is not given is left out of the namespace."""
    group = parser.add_argument_group("engine")
    group.add_argument("--config", metavar="FILE", help="YAML file with any of these options", default=None)
    for field in msgspec.structs.fields(EngineConfig):
        flags = ["--" + field.name.replace("_", "-"), *ALIASES.get(field.name, [])]
        kind, text = _describe(field.type)
        default = "" if field.default is None else f" (default: {field.default})"
        if kind is bool:
            form: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        elif isinstance(kind, tuple):
            form = {"choices": kind}
        else:
            form = {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT"}[kind]}
        group.add_argument(*flags, **form, default=argparse.SUPPRESS, help=text + default)


def _describe(annotation: object) -> tuple[type | tuple[str, ...], str]:
    """(int, float, str or bool, or the choices of a Literal; the help text) of a field's type."""
    inner, meta = typing.get_args(annotation)[:2]
    if isinstance(inner, types.UnionType):
        inner = next(part for part in typing.get_args(inner) if part is not types.NoneType)
    if typing.get_origin(inner) is typing.Literal:
        return typing.get_args(inner), meta.description
    return inner, meta.description


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The configuration that a parsed command line asks for; ConfigError names the file, the key and the mend."""
    options: dict[str, object] = {}
    if API_KEY_VARIABLE in os.environ:
        options["api_key"] = os.environ[API_KEY_VARIABLE]
    if arguments.config:
        options |= _read_config_file(Path(arguments.config))
    options |= {name: value for name, value in vars(arguments).items() if name in NAMES}
    return config_from_options(options, "the options")


def _read_config_file(path: Path) -> dict[str, object]:
    """The options of a YAML file, with `-` in keys read as `_`."""
    try:
        loaded = yaml.safe_load(path.read_bytes())  # UTF-8 in any locale
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path} must hold options as `name: value` lines")
    return {str(key).replace("-", "_"): value for key, value in loaded.items()}
