"""`engine-launch completion SHELL`: generates a completion script for the shell from the parsers of all commands."""

from __future__ import annotations

import argparse

import shtab

from ..launcher.options.arguments import add_engine_arguments
from .command import ALL_COMMANDS, COMMANDS, GATEWAY, SERVE, load_command
from .serve import new_serve_parser

DESCRIPTION = "Print a completion script; the examples write it where the shell loads it at its start."
EXAMPLES = [
    "bash > ~/.local/share/bash-completion/completions/engine-launch",
    "zsh > ~/.zfunc/_engine-launch      # with fpath+=~/.zfunc before compinit",
    "fish > ~/.config/fish/completions/engine-launch.fish",
]
SHELLS = ("bash", "zsh", "fish")
_FILES = ("config", "key_file", "chat_template", "file", "input", "output", "paths")
_COMPLETED = {"model": shtab.DIRECTORY, "tokenizer": shtab.DIRECTORY} | dict.fromkeys(_FILES, shtab.FILE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def run(arguments: argparse.Namespace) -> int:
    print(shtab.complete(_whole_parser(), shell=arguments.shell))
    return 0


def _whole_parser() -> argparse.ArgumentParser:
    """Build one parser with the engine's options and all commands, and mark arguments that are files or folders."""
    parser = new_serve_parser(takes_model=False)
    commands = parser.add_subparsers()
    for name in (SERVE, GATEWAY):
        add_engine_arguments(commands.add_parser(name, help=ALL_COMMANDS[name]))
    for name, text in COMMANDS.items():
        load_command(name).configure(commands.add_parser(name, help=text))
    for each in (parser, *commands.choices.values()):
        for action in each._actions:
            if action.dest in _COMPLETED:
                action.complete = _COMPLETED[action.dest]  # type: ignore[attr-defined]
    return parser
