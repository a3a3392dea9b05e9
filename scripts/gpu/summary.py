"""The summary of scripts/gpu_check: its document as Markdown that a person reads in a minute. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from tokenloom.scripts.gpu.plan import Results, Row, Stage, outcome

MAX_FAILED = 30
PACKAGES = ("torch", "triton", "transformers")
CHAIN = re.compile("During handling of the above exception|The above exception was the direct cause")


def summary(stages: Sequence[Stage], results: Results, remarks: Sequence[str]) -> str:
    """Return the whole summary; `remarks`: the reader's next steps."""
    parts = [_head(results), _stage_table(stages, results), _goals(stages, results), _tuning(results)]
    parts += [_memory(stages, results), _failed(stages, results), _not_measured(stages, results)]
    parts.append("\n".join(remarks))
    return "\n\n".join(part for part in parts if part) + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a Markdown table in columns that are also aligned as plain text."""
    cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]

    def line(values: Sequence[str]) -> str:
        return f"| {' | '.join(value.ljust(width) for value, width in zip(values, widths, strict=True))} |"

    return "\n".join([line(cells[0]), line(["-" * width for width in widths]), *map(line, cells[1:])])


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|")


def _head(results: Results) -> str:
    document, gpu = results.document, results.document["gpu"] or {}
    versions = ", ".join(f"{name} {document['versions'].get(name, '–')}" for name in PACKAGES)
    seconds = sum(call.get("seconds", 0) for call in document["calls"])
    lines = [f"# GPU check: {results.place.device}", ""]
    if results.place.is_rehearsal:
        lines += ["**A rehearsal on a fake device with small sizes: every figure below is without meaning.**", ""]
    memory = f"{gpu.get('memory_bytes', 0) / 2**30:.0f} GiB, {gpu.get('num_sms', '?')} multiprocessors"
    lines.append(f"{gpu.get('count', 0)} × {memory}; commit {results.place.commit}; {versions}")
    return "\n".join([*lines, f"{document['date']}, {len(document['calls'])} calls, {seconds:.0f} s in all"])


def _stage_table(stages: Sequence[Stage], results: Results) -> str:
    rows = []
    for stage in stages:
        count = results.count(stage.name)
        left = "all" if count.left is None else count.left
        starts = results.document["stages"].get(stage.name, {}).get("starts", [])
        seconds = sum(start.get("seconds", 0) for start in starts) if starts else None
        state = "left" if count.left is None else "failed" if count.failed else "left" if count.left else "done"
        expected = None if results.place.is_rehearsal else stage.expected_s
        rows.append([stage.name, state, count.passed, count.failed, count.skipped, left, seconds, expected])
    return table(["stage", "state", "passed", "failed", "not measured", "left", "seconds", "expected"], rows)


def _rows(stages: Sequence[Stage], results: Results) -> Iterator[tuple[Stage, Row]]:
    """Yield the rows of this commit."""
    for stage in stages:
        for row in results.results(stage.name).values():
            if row["commit"] == results.place.commit:
                yield stage, row


def _goals(stages: Sequence[Stage], results: Results) -> str:
    rows: list[list[Any]] = []
    for _, row in _rows(stages, results):
        for goal in row.get("goals", ()):
            sign = "> " if row.get("is_cut") else ""  # a peer that was stopped took longer
            value = f"{sign}{_cell(goal['value'])}"
            met = "–" if results.place.is_rehearsal else "yes" if goal["is_met"] else "**no**"
            rows.append([row["case"], goal["column"], goal["limit"], value, met])
    if not rows:
        return ""
    num_met = sum(row[-1] == "yes" for row in rows)
    head = "## Goals" if results.place.is_rehearsal else f"## Goals: {num_met} of {len(rows)} met"
    return f"{head}\n\n" + table(["case", "figure", "goal", "measured", "met"], rows)


def _tuning(results: Results) -> str:
    rows = [row for row in results.results("tune").values() if "entry" in row]
    lines = [
        [row["case"], each, row[f"{each}_ms"], row[f"{each}_gain"]] for row in rows for each in ("decode", "prefill")
    ]
    if not lines:
        return ""
    note = "Entries for kernels/gpu/gpu_table.json are the rows' `entry` in the JSON.\n\n"
    return f"## Tuning\n\n{note}" + table(["key", "attention", "fastest, ms", "gain over the rule"], lines)


def _memory(stages: Sequence[Stage], results: Results) -> str:
    columns = ("asked", "used_at_start", "used_after_requests", "off_by")
    rows = [
        [row["case"], *(row[name] for name in columns)] for _, row in _rows(stages, results) if "used_at_start" in row
    ]
    return f"## Memory, share of the device\n\n{table(['case', *columns], rows)}" if rows else ""


def _failed(stages: Sequence[Stage], results: Results) -> str:
    failed = [(stage, row) for stage, row in _rows(stages, results) if outcome(row) == "failed"]
    lines = []
    for stage, row in failed[:MAX_FAILED]:
        alone = ", **passes alone**" if row.get("again") == "passes alone" else ""
        lines.append(f"- {stage.name}: `{row['case']}`{alone}: {_words(row['error'])}")
    if len(failed) > MAX_FAILED:
        lines.append(f"- and {len(failed) - MAX_FAILED} more")
    return "## Failed\n\n" + "\n".join(lines) if lines else ""


def _words(error: str) -> str:
    """Return the line of a traceback that says most: pytest's first of the last error, else the last."""
    lines = [line.strip() for line in CHAIN.split(error)[-1].splitlines() if line.strip()]
    return next((line[1:].strip() for line in lines if line.startswith("E  ")), lines[-1] if lines else "")[:200]


def _not_measured(stages: Sequence[Stage], results: Results) -> str:
    reasons: dict[str, list[str]] = {}
    for _, row in _rows(stages, results):
        if outcome(row) == "skipped":
            reasons.setdefault(row["not_measured"], []).append(row["case"])
    lines = [
        f"- {reason}: {cases[0]}{f' and {len(cases) - 1} more' if cases[1:] else ''}"
        for reason, cases in reasons.items()
    ]
    return "## Not measured\n\n" + "\n".join(lines) if lines else ""
