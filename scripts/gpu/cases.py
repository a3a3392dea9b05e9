"""Cases: the named measurements of a script or tests of a run, their rows, and the file in which scripts/gpu_check
follows them.

    {"cases": [names of all], "running": {name: time of its start}, "rows": [{"case": name, …}, …]}

A row with `error` has failed, one with `not_measured` was not possible here. The file is replaced after each change,
so that a run that is stopped keeps its rows, and names the cases that were running. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]

MAX_ERROR = 6000  # characters
BROKEN_EXIT = 3  # the process can measure nothing more, others can


def shortened(error: str) -> str:
    """Return an error's beginning and end: long values may stand in its middle."""
    half = MAX_ERROR // 2
    return error if len(error) <= MAX_ERROR else f"{error[:half]}\n…\n{error[-half:]}"


def write_json(file: Path, document: object) -> None:
    """Replace a file by this document, so that a reader finds either the old or the new one."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(file)


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the flags that choose cases and the file of their rows."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows, after each of them")
    parser.add_argument("--skip", type=Path, metavar="FILE", help="JSON list of cases to leave out")
    parser.add_argument("--small", action="store_true", help="sizes that run anywhere: shows the code, not the speed")
    return parser


class Cases:
    """The cases of one run. `check` raises if this process cannot measure any more, as after a fault of the device."""

    def __init__(self, file: Path | None, names: Sequence[str], check: Callable[[], object] = lambda: None) -> None:
        self._file, self._check = file, check
        self._wanted = set(names)
        self.document: dict[str, Any] = {"cases": list(names), "running": {}, "rows": []}
        self._write()

    @classmethod
    def of_options(
        cls, options: argparse.Namespace, names: Sequence[str], check: Callable[[], object] = lambda: None
    ) -> Cases:
        """Return the cases of `names` that the flags of `new_parser` leave."""
        cases = cls(options.json, names, check)
        cases._wanted -= set(json.loads(options.skip.read_text(encoding="utf-8")) if options.skip else ())
        return cases

    def wants(self, name: str) -> bool:
        return name in self._wanted

    @property
    def rows(self) -> list[Row]:
        rows: list[Row] = self.document["rows"]
        return rows

    @property
    def has_failed(self) -> bool:
        return any("error" in row for row in self.rows)

    def note(self, facts: Mapping[str, object]) -> None:
        """Write more facts beside the rows."""
        self.document |= facts
        self._write()

    def start(self, name: str) -> None:
        self.document["running"][name] = time.time()
        self._write()

    def add(self, row: Row) -> None:
        """Add the row of a case, which then no longer runs."""
        begun = self.document["running"].pop(row["case"], None)
        took = {} if begun is None or "took_s" in row else {"took_s": round(time.time() - begun, 2)}
        self.rows.append({**row, **took})
        self._write()

    def measure(self, name: str, run: Callable[[], Row]) -> Row | None:
        """Measure a case if it is wanted, print and return its row; an error becomes the row's. SystemExit if the
        process can measure nothing more."""
        if not self.wants(name):
            return None
        self.start(name)
        try:
            row = {"case": name, **run()}
        except Exception:  # one failed case must not keep the others from running
            row = {"case": name, "error": shortened(traceback.format_exc())}
        self.add(row)
        print(f"{name}: {row['error']}" if "error" in row else json.dumps(row, ensure_ascii=False), flush=True)
        if "error" in row:
            try:
                self._check()
            except Exception as error:
                print(f"{name}: after its error the device answers no more: {error}", file=sys.stderr, flush=True)
                raise SystemExit(BROKEN_EXIT) from None
        return row

    def _write(self) -> None:
        if self._file is not None:
            write_json(self._file, self.document)
