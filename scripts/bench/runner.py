"""Run a benchmark: its command line, its checkpoint, and its report. A benchmark is a `Case`, most of which is data.

engine-launch bench NAME …        runs CASE of cases/NAME.py, whose docstring is the help text
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenloom.frontend.launcher.options.arguments import add_engine_arguments
from tokenloom.scripts.bench.report import Json, Report, new_parser
from tokenloom.scripts.bench.workload import Workload, device_of, engine_options, find_checkpoint, vocab_size

REQUIRED = object()  # the default of an option that must be given
DESTINATIONS = {"--in": "num_in", "--out": "num_out", "--requests": "num_requests"}
SHORT = {"num_requests": "N", "num_in": "in", "num_out": "out"}  # in a report


@dataclass(frozen=True)
class Case:
    """A benchmark. `options` by flag, or by name for an argument: its default, whose type its values have, a list for
    several; its help text; and a parser of other values."""

    name: str  # in reports
    measure: Callable[[Setup], object]
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    model: str = "MODEL"  # the first argument, with the engine's flags; a name: the default of --checkpoint; "": none
    num_requests: int | None = None  # the default of [N] [IN] [OUT], if it has them
    has_lengths: bool = False  # [IN] [OUT] alone
    rounds: int = 2  # default of --rounds; 0: it has none
    dtype: str | None = None  # of the engine, if none is given


class Setup:
    """A command line of a case, its report, and the stack of its resources.

    Of a case with a model also: `folder`, its checkpoint; `options`, the given engine flags as keywords of LLM;
    `workload` of the given shape.
    """

    def __init__(self, case: Case, parser: argparse.ArgumentParser, words: Sequence[str] | None) -> None:
        """Parse `words`, or the arguments of this process."""
        self.arguments = parser.parse_args(words)
        self.stack = contextlib.ExitStack()
        given = vars(self.arguments)
        settings: dict[str, Json] = {}
        if case.model:
            self.options: dict[str, Any] = engine_options(parser, self.arguments)
            if case.dtype is not None:
                self.options.setdefault("dtype", case.dtype)
            self.folder = find_checkpoint(given["checkpoint"])
            self.dtype, self.device = str(self.options.get("dtype", "auto")), device_of(self.options)
            shape = (given.get("num_requests", 1), given.get("num_in", 1), given.get("num_out", 1))
            self.workload = Workload(*shape, vocab_size(self.folder))
            settings = {"model": given["checkpoint"], "dtype": self.dtype, "device": self.device}
        names = [*SHORT, "rounds", *map(destination, case.options)]
        settings |= {SHORT.get(each, each): given[each] for each in names if is_setting(given.get(each))}
        self.report = Report(case.name, settings)


def is_setting(value: object) -> bool:
    """Return whether an argument's value belongs into a report: a number, or several; not a path."""
    return bool(value) and isinstance(value, bool | int | float | list | tuple)


def destination(flag: str) -> str:
    return DESTINATIONS.get(flag, flag.lstrip("-").replace("-", "_"))


def add_option(
    parser: argparse.ArgumentParser, flag: str, default: Any, text: str = "", kind: Callable[[str], Any] | None = None
) -> None:
    """Add an option as `Case` describes it."""
    words: dict[str, Any] = {"help": text, "default": default}
    if isinstance(default, bool):
        words["action"] = argparse.BooleanOptionalAction if default else "store_true"
    elif default is REQUIRED:
        words |= {"type": kind} | ({"required": True} if flag.startswith("-") else {})
    else:
        is_many = isinstance(default, list)
        of_one = next(iter(default), "") if is_many else default
        words["type"] = kind or (str if of_one is None else type(of_one))
        if default is not None:
            words["help"] = f"{text} (default {default})".strip()
        if is_many:
            words["nargs"] = "+" if flag.startswith("-") else "*"
        elif not flag.startswith("-"):
            words["nargs"] = "?"
    if flag.startswith("-"):
        words["dest"] = destination(flag)
    parser.add_argument(flag, **words)


def read_options(
    description: str | None, options: Mapping[str, tuple[Any, ...]], words: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse `words`, or the arguments of this process, of a program with these options and --json."""
    parser = new_parser(description)
    for flag, option in options.items():
        add_option(parser, flag, *option)
    return parser.parse_args(words)


def parser_of(case: Case, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a case's command line."""
    parser = new_parser(description)
    text = "folder, GGUF file, demo, or a name of make_checkpoint.py such as 135m"
    if case.model == "MODEL":
        parser.add_argument("checkpoint", metavar="MODEL", help=text)
    elif case.model:
        parser.add_argument("--checkpoint", metavar="MODEL", default=case.model, help=f"{text} (default {case.model})")
    if case.num_requests is not None:
        parser.add_argument("num_requests", metavar="N", type=int, nargs="?", default=case.num_requests)
    if case.has_lengths or case.num_requests is not None:
        for name, metavar, what, default in (("num_in", "IN", "prompt", 128), ("num_out", "OUT", "answer", 64)):
            help_text = f"{what} tokens (default {default})"
            parser.add_argument(name, metavar=metavar, type=int, nargs="?", default=default, help=help_text)
    if case.rounds:
        add_option(parser, "--rounds", case.rounds, "number of rounds of all measurements")
    for flag, option in case.options.items():
        add_option(parser, flag, *option)
    if case.model:
        add_engine_arguments(parser)
    return parser


def run_case(case: Case, description: str | None, name: str | None = None, words: Sequence[str] | None = None) -> int:
    """Run a case with the arguments `words`, or those of this process, whose program is called `name` in help texts;
    return exit code 0."""
    parser = parser_of(case, description)
    parser.prog = name or parser.prog
    setup = Setup(case, parser, words)
    with setup.stack:
        case.measure(setup)
    setup.report.publish(setup.arguments.json)
    return 0


def run_named(name: str, words: Sequence[str]) -> int:
    """Run CASE of cases/NAME.py, whose docstring is its help text."""
    module = importlib.import_module(f"tokenloom.scripts.bench.cases.{name}")
    return run_case(module.CASE, module.__doc__, f"engine-launch bench {name}", words)
