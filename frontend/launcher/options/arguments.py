"""Command line with one flag for each field of EngineConfig, merged with the YAML file and the environment.

A flag is a field's name with dashes; a boolean field also has a `--no-` form. The command line takes precedence over
the file.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ....ipc.sockets.endpoints import DEFAULT_PORT
from ....ipc.spec.config.engine_config import EngineConfig
from ....ipc.spec.config.option_groups import GROUPS
from .environment import with_key
from .options import KINDS, Given, Kind
from .parser import value_parser
from .synonyms import NAMES, SWITCHES
from .vllm_options import VLLM_OPTIONS

_METAVARS = {int: "N", float: "X", str: "TEXT", dict: "JSON", list: "NAME"}
_HIDDEN: dict[Any, dict[str, Any]] = {
    bool: {"action": argparse.BooleanOptionalAction},
    list: {"nargs": "*", "action": "extend"},
    str: {},
}
_HTTP_OPTIONS = ("http", "host", "port", "uds")  # each of them enables HTTP


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of EngineConfig, in groups, and hidden flags for vLLM's other options. In the parsed
    namespace, options that are not given are absent, except `config`."""
    group = parser.add_argument_group("file")
    group.add_argument("--config", metavar="FILE", help="YAML file with any of these options", default=None)
    groups = {name: parser.add_argument_group(name, text) for name, text in GROUPS.items()}
    for field in msgspec.structs.fields(EngineConfig):
        kind = KINDS[field.name]
        default = "" if field.default is None else f" (default: {field.default})"
        text = (kind.description + default).replace("%", "%%")
        names = (field.name, *(other for other, name in NAMES.items() if name == field.name))
        flags = [flag for name in names for flag in _flags(name)]
        groups[kind.group].add_argument(*flags, **_form(kind), default=argparse.SUPPRESS, help=text)
    for name in SWITCHES:
        hidden = _HIDDEN[bool] | {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        parser.add_argument(*_flags(name), **hidden)
    for name, option in VLLM_OPTIONS.items():
        hidden = _HIDDEN[option.type] | {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        parser.add_argument(*_flags(name), **hidden)


def _form(kind: Kind) -> dict[str, Any]:
    if kind.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind.type is list:
        return {"nargs": "+", "action": "extend", "metavar": _METAVARS[list]}
    shown = {"choices": kind.choices} if kind.choices else {"metavar": _METAVARS[kind.type]}
    return {"type": value_parser(kind)} | shown


def given_options(arguments: argparse.Namespace, *, has_http: bool = False) -> dict[str, Given]:
    """Return the options given by the environment (only the API key), the file and the command line, by name. Later
    sources override earlier ones.

    `has_http`: serve HTTP on DEFAULT_PORT unless an option gives an address. ConfigError for a bad file."""
    options = with_key({}, os.environ)
    if arguments.config:
        from .config_file import read_config_file  # imports yaml

        options |= read_config_file(Path(arguments.config))
    typed = {name: value for name, value in vars(arguments).items() if name in (*KINDS, *SWITCHES, *VLLM_OPTIONS)}
    spellings: dict[str, str] = getattr(arguments, "spellings", {})
    options |= {name: Given(value, spellings.get(name, _flags(name)[0])) for name, value in typed.items()}
    if has_http and not any(name in options for name in _HTTP_OPTIONS):
        options["port"] = Given(DEFAULT_PORT, "--port")
    return options


def _flags(name: str) -> Sequence[str]:
    """Return the flags of an option or alias, such as --max-num-seqs. An alias of at most 3 letters also has one with a
    single dash (-tp)."""
    written = name.replace("_", "-")
    return (f"-{written}", f"--{written}") if len(name) < 4 and name not in KINDS else (f"--{written}",)
