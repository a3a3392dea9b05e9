"""The command line and the YAML file, made from the fields of EngineConfig.

A flag is a field's name with dashes; a field that is true or false also has a `--no-` form. Values given on the
command line win over those of the file.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.config.engine_config import API_KEY_VARIABLE, DEFAULT_PORT, GROUPS, EngineConfig
from .config_file import read_config_file
from .foreign import FOREIGN, Foreign
from .options import KINDS, Given, Kind, new_config
from .parser import value_parser
from .synonyms import NAMES

_METAVARS = {int: "N", float: "X", str: "TEXT", dict: "JSON", list: "NAME"}
_DOOR = ("http", "host", "port", "uds")  # each of which says where HTTP is served


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per field of EngineConfig, in groups, and hidden ones for vLLM's others; what is not given is left out
    of the namespace."""
    group = parser.add_argument_group("file")
    group.add_argument("--config", metavar="FILE", help="YAML file with any of these options", default=None)
    groups = {name: parser.add_argument_group(name, text) for name, text in GROUPS.items()}
    for field in msgspec.structs.fields(EngineConfig):
        kind = KINDS[field.name]
        default = "" if field.default is None else f" (default: {field.default})"
        text = (kind.description + default).replace("%", "%%")
        flags = [flag for name in (field.name, *_other_names(field.name)) for flag in _flags(name)]
        groups[kind.group].add_argument(*flags, **_form(kind), default=argparse.SUPPRESS, help=text)
    for name, option in FOREIGN.items():
        hidden = _foreign_form(option) | {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        parser.add_argument(*_flags(name), **hidden)


def _form(kind: Kind) -> dict[str, Any]:
    if kind.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind.type is list:
        return {"nargs": "+", "metavar": _METAVARS[list]}
    shown = {"choices": kind.choices} if kind.choices else {"metavar": _METAVARS[kind.type]}
    return {"type": value_parser(kind)} | shown


def _foreign_form(option: Foreign) -> dict[str, Any]:
    if option.is_flag:
        return {"action": argparse.BooleanOptionalAction}
    return {"nargs": "*"} if option.has_words else {}


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The configuration that a parsed command line asks for; ConfigError names the file, the option and the mend."""
    return new_config(given_options(arguments))


def given_options(arguments: argparse.Namespace, *, has_http: bool = False) -> dict[str, Given]:
    """What command line, file and environment give, by name of the option.

    `has_http`: HTTP is served on DEFAULT_PORT where nothing says where.
    """
    options: dict[str, Given] = {}
    if API_KEY_VARIABLE in os.environ:
        options["api_key"] = Given(os.environ[API_KEY_VARIABLE], "--api-key")
    if arguments.config:
        options |= read_config_file(Path(arguments.config))
    typed = {name: value for name, value in vars(arguments).items() if name in KINDS or name in FOREIGN}
    options |= {name: Given(value, flag_of(name)) for name, value in typed.items()}
    if has_http and not any(name in options for name in _DOOR):
        options["port"] = Given(DEFAULT_PORT, "--port")
    return options


def flag_of(name: str) -> str:
    return _flags(name)[0]


def _flags(name: str) -> Sequence[str]:
    """Those of an option's name; short ones have one dash, as vLLM's, and may have two."""
    written = name.replace("_", "-")
    return (f"-{written}", f"--{written}") if len(name) < 4 and name not in KINDS else (f"--{written}",)


def _other_names(name: str) -> Sequence[str]:
    return [other for other, meant in NAMES.items() if meant == name]
