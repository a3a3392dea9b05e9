"""Report: one benchmark's rows as a table on stdout and as JSON, with the machine, the date and the commit.

Knows no benchmark. A row is a mapping from column to number or text; columns appear in the order of their first use.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from tokenloom.kernels.cpu.processor import instruction_levels

Cell: TypeAlias = float | int | str | None
Json: TypeAlias = "Cell | bool | Sequence[Json] | Mapping[str, Json]"

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("tokenloom", "torch", "triton", "transformers", "numpy", "pyzmq", "msgspec", "tokenizers")


class Report:
    """The results of one run of one benchmark."""

    def __init__(self, name: str, settings: Mapping[str, Json]) -> None:
        self._name = name
        self._settings = dict(settings)  # without folders, which are those of one machine
        self._settings |= {k: Path(v).name for k, v in settings.items() if isinstance(v, str) and v[:1] == "/"}
        self._machine = machine()
        self._rows: list[dict[str, Cell]] = []
        self._notes: dict[str, Json] = {}

    def add(self, **row: Cell) -> None:
        self._rows.append(row)

    def note(self, name: str, value: Json) -> None:
        """Add a figure beside the table."""
        self._notes[name] = value

    def note_ratios(self, name: str, values: Sequence[float], others: Sequence[float]) -> None:
        """Note the median over the rounds of a value relative to another, and the interval of that median."""
        ratios = [one / other for one, other in zip(values, others, strict=True)]
        self.note(name, [median(ratios), *median_interval(ratios)])

    def publish(self, path: Path | None) -> None:
        """Print the table; also write the JSON to `path` if given."""
        settings = ", ".join(f"{name} {value}" for name, value in self._settings.items() if value is not None)
        print(f"\n{self._name}: {settings}\n")
        print(table(self._rows))
        for name, value in self._notes.items():
            print(f"{name}: {format_cell(value) if isinstance(value, (float, int, str)) else json.dumps(value)}")
        if path is not None:
            path.write_text(json.dumps(self.document(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def document(self) -> dict[str, Json]:
        return {
            "benchmark": self._name,
            "settings": self._settings,
            "machine": self._machine,
            "rows": self._rows,
            "notes": self._notes,
        }


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with --json that prints the description unwrapped."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    return parser


def print_json(found: Mapping[str, object], path: Path | None) -> None:
    """Print the results of a harness without a table as JSON; also write them to `path` if given."""
    text = json.dumps(found, indent=2, ensure_ascii=False)
    print(text)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")


def table(rows: Sequence[Mapping[str, Cell]]) -> str:
    """Format rows in aligned columns, numbers to the right."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([format_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    is_number = [all(isinstance(row.get(name), (int, float, type(None))) for row in rows) for name in columns]

    def format_line(line: Sequence[str]) -> str:
        parts = (
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, is_number, strict=True)
        )
        return "  ".join(parts).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([format_line(cells[0]), rule, *map(format_line, cells[1:])])


def format_cell(value: Json) -> str:
    """Format a number with at least three significant digits and no needless decimals."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
    return str(value)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile, interpolated linearly between the nearest two values; nan if there are none."""
    return float(np.percentile(values, percent)) if values else float("nan")


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def median_interval(values: Sequence[float]) -> list[float]:
    """Return the interval that holds the median with about 95 %, from the order of the values."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    first, last = int(len(values) / 2 - half), int(len(values) / 2 + half)
    return [ordered[max(first, 0)], ordered[min(last, len(values) - 1)]]


def machine() -> dict[str, Json]:
    """Return facts about the machine, so that a reader can place the figures; a shared machine's speed drifts with
    `load`."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": _cpu_model(),
        "c_kernels": next(iter(instruction_levels()), None),  # unless --cpu-isa or --enforce-reference says otherwise
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions(),
    }


def versions() -> dict[str, Json]:
    """Return the versions of the packages that matter and are installed."""
    installed = {each.name.lower(): each.version for each in importlib.metadata.distributions() if each.name}
    return {name: installed[name] for name in PACKAGES if name in installed}


def commit() -> str:
    """Return the checkout's commit, marked if files differ from it; "unknown" outside a checkout."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=10).stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
