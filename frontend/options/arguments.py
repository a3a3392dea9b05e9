"""The command line and the YAML file, made from the fields of EngineConfig.

A flag is a field's name with dashes; a field that is true or false also has a `--no-` form. Values given on the
command line win over those of the file.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.config.engine_config import API_KEY_VARIABLE, EngineConfig
from .config_file import read_config_file
from .options import KINDS, Given, new_config
from .parser import value_parser

ALIASES = {"tensor_parallel_size": ["--tp"], "listen": ["--address"]}
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per field of EngineConfig; what is not given is left out of the namespace."""
    group = parser.add_argument_group("engine")
    group.add_argument("--config", metavar="FILE", help="YAML file with any of these options", default=None)
    for field in msgspec.structs.fields(EngineConfig):
        flags, kind = [_flag(field.name), *ALIASES.get(field.name, [])], KINDS[field.name]
        default = "" if field.default is None else f" (default: {field.default})"
        form: dict[str, Any] = {"type": value_parser(kind)}
        if kind.type is bool:
            form = {"action": argparse.BooleanOptionalAction}
        elif kind.choices:
            form["choices"] = kind.choices
        else:
            form["metavar"] = _METAVARS[kind.type]
        group.add_argument(*flags, **form, default=argparse.SUPPRESS, help=kind.description + default)


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The configuration that a parsed command line asks for; ConfigError names the file, the option and the mend."""
    options: dict[str, Given] = {}
    if API_KEY_VARIABLE in os.environ:
        options["api_key"] = Given(os.environ[API_KEY_VARIABLE], "--api-key")
    if arguments.config:
        options |= read_config_file(Path(arguments.config))
    options |= {name: Given(value, _flag(name)) for name, value in vars(arguments).items() if name in KINDS}
    return new_config(options)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
