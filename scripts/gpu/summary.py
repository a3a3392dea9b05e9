"""The summary of scripts/gpu_check: its document as Markdown that a person reads in a minute. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tokenloom.scripts.gpu.results import Results, Row
from tokenloom.scripts.gpu.stages import Stage

MAX_FAILED = 30
PACKAGES = ("torch", "triton", "transformers")
CHAIN = re.compile("During handling of the above exception|The above exception was the direct cause")


def summary(stages: Sequence[Stage], results: Results, remark: str) -> str:
    """Return the whole summary; `remark`: the reader's next step."""
    parts = [_head(results), _stage_table(stages, results), _goals(stages, results)]
    parts += [_failed(stages, results), _not_measured(stages, results), remark]
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
    document, gpu = results.document, results.document["gpu"]
    versions = ", ".join(f"{name} {document['versions'].get(name, '–')}" for name in PACKAGES)
    seconds = sum(call.get("seconds", 0) for call in document["calls"])
    lines = [f"# GPU check: {gpu['name']}", ""]
    if document["is_rehearsal"]:
        lines += ["**A rehearsal on a fake device with small sizes: every figure below is without meaning.**", ""]
    memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB, {gpu['num_sms']} multiprocessors"
    lines.append(f"{gpu['count']} × {memory}; commit {document['commit']}; {versions}")
    return "\n".join([*lines, f"{document['date']}, {len(document['calls'])} calls, {seconds:.0f} s in all"])


def _stage_table(stages: Sequence[Stage], results: Results) -> str:
    rows = []
    for stage in stages:
        count = results.count(stage.name)
        left = "all" if count.left is None else count.left
        seconds = sum(start["seconds"] for start in results.starts(stage.name))
        state = "failed" if count.failed else "left" if left else "done"
        rows.append(
            [stage.name, state, count.passed, count.failed, count.not_measured, left, seconds, stage.expected_s]
        )
    return table(["stage", "state", "passed", "failed", "not measured", "left", "seconds", "expected"], rows)


def _rows(stages: Sequence[Stage], results: Results) -> Iterator[tuple[Stage, Row]]:
    for stage in stages:
        for row in results.rows(stage.name).values():
            yield stage, row


def _goals(stages: Sequence[Stage], results: Results) -> str:
    rows: list[list[object]] = []
    for _, row in _rows(stages, results):
        for goal in row.get("goals", ()):
            met = "–" if results.document["is_rehearsal"] else "yes" if goal["is_met"] else "**no**"
            rows.append([row["case"], goal["column"], goal["limit"], goal["value"], met])
    if not rows:
        return ""
    head = f"## Goals: {sum(row[-1] == 'yes' for row in rows)} of {len(rows)} met"
    return f"{head}\n\n" + table(["case", "figure", "goal", "measured", "met"], rows)


def _failed(stages: Sequence[Stage], results: Results) -> str:
    lines = []
    for stage, row in _rows(stages, results):
        if "error" in row:
            lines.append(f"- {stage.name}: `{row['case']}`: {_words(row['error'])}")
        elif "failed_before" in row:
            lines.append(f"- {stage.name}: `{row['case']}`, **passed at another try**: {_words(row['failed_before'])}")
    if len(lines) > MAX_FAILED:
        lines[MAX_FAILED:] = [f"- and {len(lines) - MAX_FAILED} more"]
    return "## Failed\n\n" + "\n".join(lines) if lines else ""


def _words(error: str) -> str:
    """Return the line of a traceback that says most: pytest's first of the last error, else the last."""
    lines = [line.strip() for line in CHAIN.split(error)[-1].splitlines() if line.strip()]
    return next((line[1:].strip() for line in lines if line.startswith("E  ")), lines[-1] if lines else "")[:200]


def _not_measured(stages: Sequence[Stage], results: Results) -> str:
    reasons: dict[str, list[str]] = {}
    for _, row in _rows(stages, results):
        if "not_measured" in row:
            reasons.setdefault(row["not_measured"], []).append(row["case"])
    lines = [
        f"- {reason}: {cases[0]}{f' and {len(cases) - 1} more' if cases[1:] else ''}"
        for reason, cases in reasons.items()
    ]
    return "## Not measured\n\n" + "\n".join(lines) if lines else ""
