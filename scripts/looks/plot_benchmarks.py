"""Draw the results under docs/reference/benchmarks/ as bars in SVG, one file per JSON that a benchmark wrote.

    python scripts/looks/plot_benchmarks.py [FOLDER]

Each picture shows one figure of one benchmark: the median over the rounds for each engine or setting, its number beside
the bar. Colours follow the reader's light or dark theme.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tokenloom.scripts.bench.report import ROOT, format_cell, median

WIDTH, LABEL, BAR, GAP, TOP, LINE = 760, 230, 22, 10, 64, 18  # px; LABEL: room for the names
NOTE_LETTERS = 110  # of a line that fits into WIDTH
STYLE = """text{font:13px system-ui,sans-serif;fill:#1b1f24}.title{font-weight:600;font-size:15px}.note{fill:#59636e}
.ours{fill:#1f6feb}.peer{fill:#a8b1bb}@media(prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9198a1}
.peer{fill:#59636e}.ours{fill:#4493f8}}"""


@dataclass(frozen=True)
class Figure:
    """A bar chart of one benchmark: title, the column that names the bars, that of their lengths. Without `by` those
    columns that begin with `column` are bars, named by the rest."""

    title: str
    by: str
    column: str
    is_less_better: bool = False


FIGURES = {  # by the benchmark's name in its JSON
    "compare": Figure("output tokens/s", "engine", "out_tokens_per_s"),
    "engine without a model": Figure("CPU µs per token, all but the worker", "engine", "us_per_token", True),
    "cost of a streamed token": Figure("CPU µs per streamed token, all but the worker", "server", "us_per_token", True),
    "reading of answers": Figure("CPU µs of a character, by the kind of text", "read", "character_us", True),
    "masks of calls": Figure("CPU µs of the median mask, by the part of the answer", "part", "median_us", True),
    "KV groups": Figure("bytes of a decoding request of 32k tokens, of those of one group", "shape", "decoding", True),
    "conversation": Figure("known tokens of a turn that are computed again, median", "", "again_", True),
    "start-up": Figure("seconds from the command to the first token", "engine", "first_token_s", True),
}


def bars(document: Mapping[str, Any], figure: Figure) -> dict[str, float]:
    """Return the median over each name's rows, in the order of first rows."""
    values: dict[str, list[float]] = {}
    for row in document["rows"]:
        for name, value in _lengths(row, figure).items():
            values.setdefault(name, []).append(value)
    return {name: median(each) for name, each in values.items()}


def _lengths(row: Mapping[str, Any], figure: Figure) -> dict[str, float]:
    """Return the lengths in a row by the names of the bars."""
    if figure.by:
        return {row[figure.by]: row[figure.column]} if row.get(figure.column) is not None else {}
    return {name.removeprefix(figure.column): row[name] for name in row if name.startswith(figure.column)}


def figure_of(document: Mapping[str, Any]) -> Figure | None:
    """Return the figure of a result; None if its benchmark has none or there is nothing to compare."""
    figure = FIGURES.get(document["benchmark"])
    return figure if figure is not None and len(bars(document, figure)) > 1 else None


def draw(document: Mapping[str, Any], figure: Figure) -> str:
    """Return the figure as SVG."""
    settings = ", ".join(f"{name} {value}" for name, value in document["settings"].items() if value is not None)
    machine = document["machine"]
    source = f"{machine['cpu']}, {machine['num_cpus']} cores, {machine['date'][:10]}, commit {machine['commit']}"
    values = bars(document, figure)
    notes = textwrap.wrap(settings, NOTE_LETTERS)
    top = TOP + LINE * (len(notes) - 1)
    height = top + len(values) * (BAR + GAP) + 28
    title = f"{figure.title} ({'less' if figure.is_less_better else 'more'} is better)"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<text class="title" x="8" y="24">{escape(title)}</text>',
        *(f'<text class="note" x="8" y="{46 + LINE * i}">{escape(note)}</text>' for i, note in enumerate(notes)),
        *_bar_lines(values, top),
        f'<text class="note" x="8" y="{height - 8}">{escape(source)}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _bar_lines(values: Mapping[str, float], top: int) -> list[str]:
    longest, lines = max(values.values()), []
    for i, (name, value) in enumerate(values.items()):
        y, width = top + i * (BAR + GAP), max((WIDTH - LABEL - 90) * value / longest, 1)
        kind = "ours" if name.startswith("tokenloom") else "peer"
        lines.append(f'<text x="{LABEL - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        lines.append(f'<rect class="{kind}" x="{LABEL}" y="{y}" width="{width:.1f}" height="{BAR}" rx="3"/>')
        lines.append(f'<text x="{LABEL + width + 8:.1f}" y="{y + 16}">{format_cell(value)}</text>')
    return lines


def plot(folder: Path) -> list[Path]:
    """Draw each result in `folder` that has a figure, beside its JSON; return the pictures' paths."""
    written = []
    for file in sorted(folder.glob("*.json")):
        document = json.loads(file.read_text(encoding="utf-8"))
        figure = figure_of(document)
        if figure is not None:
            file.with_suffix(".svg").write_text(draw(document, figure), encoding="utf-8")
            written.append(file.with_suffix(".svg"))
    return written


def main(arguments: Sequence[str]) -> int:
    for file in plot(Path(arguments[0]) if arguments else ROOT / "docs/reference/benchmarks"):
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
