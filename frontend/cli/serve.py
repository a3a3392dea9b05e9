"""The parser of `engine-launch [serve]`, the command that may be left out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ...ipc.version import tokenloom_version
from ..launcher.options.arguments import add_engine_arguments
from ..launcher.options.help import HelpAction
from ..launcher.options.parser import OptionParser
from .command import ALL_COMMANDS, list_examples, list_in_columns


class VersionAction(argparse.Action):
    """argparse action of --version: prints the version and ends the program. Looks it up only then."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        parser._print_message(f"tokenloom {tokenloom_version()}\n", sys.stdout)
        parser.exit()


def new_serve_parser(*, takes_model: bool = True) -> OptionParser:
    """Make the parser of `engine-launch [serve]`; with `takes_model`, MODEL may be a word without a flag."""
    parser = OptionParser(
        prog="engine-launch",
        usage="engine-launch [serve] [MODEL] [OPTION …]\n       engine-launch COMMAND --help",
        description="Serve a model: starts one frontend, one core and one worker per rank. Or run a command:\n\n"
        + list_in_columns(ALL_COMMANDS),
        epilog=list_examples(
            (
                "engine-launch serve Qwen/Qwen3-0.6B",
                "engine-launch ./Qwen3-0.6B --tp 2 --listen tcp://0.0.0.0:5555 --key-file engine.key",
            )
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-h", "--help", nargs="?", metavar="WORD", action=HelpAction, default=argparse.SUPPRESS, help="print this help"
    )
    parser.add_argument(
        "-v", "--version", nargs=0, action=VersionAction, default=argparse.SUPPRESS, help="print the version"
    )
    if takes_model:
        text = "a folder, a GGUF file, a hub id or demo, as --model"
        parser.add_argument("named_model", nargs="?", metavar="MODEL", help=text)
    add_engine_arguments(parser)
    return parser
