"""`engine-launch ls [PATH …]`: lists the models in the hub's cache, or below folders, with size, format and fit."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ....ipc.errors import ConfigError
from ....ipc.process.machine_memory import gib
from ...checkpoint.downloads.cached import CachedRepository
from ...checkpoint.downloads.listing import CachedModel, cached_models
from ...checkpoint.gguf.choice import first_parts
from ...checkpoint.machine import Fit, Machine, this_machine
from ...checkpoint.model_facts import ModelFacts, facts_of
from ..engines import age
from .hub_options import add_hub_options, hub_config

DESCRIPTION = (
    "List the models in the hub's cache, or in folders: their size, format, last use, and whether they fit here."
)
EXAMPLES = ["", "~/models", "--json"]
HEAD = ("MODEL", "SIZE", "FORMAT", "USED", "FITS")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A model in the list."""

    model: str  # the name that serves it
    num_bytes: int
    used_at: float  # unix seconds
    path: str | None = None
    facts: ModelFacts | None = None  # None: it cannot be served, see `problem`
    fit: Fit | None = None  # None: it is not known
    problem: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a folder with GGUF files or checkpoints, or one of them; none: the hub's cache"
    parser.add_argument("paths", nargs="*", metavar="PATH", type=Path, help=text)
    parser.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    add_hub_options(parser)


def run(arguments: argparse.Namespace) -> int:
    machine: Machine | None = None
    try:
        machine = this_machine()
        last = str(machine)
    except ConfigError as error:
        last = str(error)
    config = hub_config(arguments)
    if arguments.paths:
        rows = [row for path in arguments.paths for row in rows_below(path.expanduser(), machine)]
        nothing = "no GGUF file and no checkpoint there"
    else:
        rows = [row_of_cached(model, machine) for model in cached_models(config)]
        nothing = f"no model in {CachedRepository('', config).cache}: engine-launch pull owner/name fetches one"
    if arguments.json:
        print(json.dumps([_as_json(row) for row in rows]))
    elif rows:
        print("\n".join([*table(rows, time.time()), last]))
    else:
        print(nothing)
    return 0


def row_of_cached(model: CachedModel, machine: Machine | None) -> Row:
    if model.place is None:
        problem = "a fetch that was broken off: engine-launch pull goes on with it"
        return Row(model=str(model.name), num_bytes=model.num_bytes, used_at=model.used_at, problem=problem)
    return _row(str(model.name), model.place, model.num_bytes, model.used_at, machine)


def rows_below(path: Path, machine: Machine | None) -> Iterator[Row]:
    """Yield a row for the file or checkpoint at a path. For any other folder yield one for each GGUF file in it or in a
    folder in it, and for each folder in it that is a checkpoint. ConfigError if there is no such path."""
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file or folder")
    if path.is_file() or (path / "config.json").is_file():
        yield _row_of_path(path, machine)
        return
    inside = sorted(path.iterdir())
    below = [each for folder in inside if folder.is_dir() for each in _files_in(folder)]
    names = [str(each.relative_to(path)) for each in [*inside, *below] if each.is_file()]
    yield from (_row_of_path(path / first, machine) for first in first_parts(names))
    yield from (_row_of_path(each, machine) for each in inside if (each / "config.json").is_file())


def _files_in(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _row_of_path(path: Path, machine: Machine | None) -> Row:
    files = [each for each in path.iterdir() if each.is_file()] if path.is_dir() else [path]
    statuses = [each.stat() for each in files]
    return _row(
        str(path), path, sum(each.st_size for each in statuses), max(each.st_atime for each in statuses), machine
    )


def _row(model: str, path: Path, num_bytes: int, used_at: float, machine: Machine | None) -> Row:
    facts: ModelFacts | None = None
    problem: str | None = None
    try:
        facts = facts_of(path)
    except ConfigError as error:
        problem = str(error).removeprefix(str(path)).removeprefix(": ").strip()
    fit = machine.fit(facts.needs) if machine is not None and facts is not None and facts.needs else None
    return Row(
        model=model,
        num_bytes=num_bytes if path.is_dir() or facts is None else facts.num_bytes,
        used_at=used_at,
        path=str(path),
        facts=facts,
        fit=fit,
        problem=problem,
    )


def table(rows: list[Row], now: float) -> list[str]:
    """Format a head and a line for each model; `now` in unix seconds. The reason why one cannot be served is cut."""
    cells = [HEAD, *(_cells(row, now) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _cells(row: Row, now: float) -> tuple[str, ...]:
    kind = "" if row.facts is None else row.facts.format
    fits = str(row.fit or "") if row.problem is None else _short(row.problem)
    return (row.model, gib(row.num_bytes), kind, f"{age(now - row.used_at)} ago", fits)


def _short(problem: str, most: int = 70) -> str:
    return problem if len(problem) <= most else problem[: most - 1] + "…"


def _as_json(row: Row) -> dict[str, object]:
    shown: dict[str, object] = msgspec.to_builtins(row)
    if row.facts is not None:
        facts: dict[str, object] = msgspec.to_builtins(row.facts)
        shown["facts"] = facts | {"template": row.facts.template is not None}
    return shown
