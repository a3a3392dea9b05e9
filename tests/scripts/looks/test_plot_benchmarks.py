"""Pictures show the committed results, and the documents' pictures are up to date."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tokenloom.scripts.bench.report import ROOT
from tokenloom.scripts.looks.plot_benchmarks import FIGURES, bars, draw, figure_of

RESULTS = sorted((ROOT / "docs/reference/benchmarks").glob("*.json"))


def test_bars_are_medians_with_proportional_lengths() -> None:
    rows = [{"engine": name, "us_per_token": value} for value in (4.0, 2.0, 6.0) for name in ("tokenloom", "a < b")]
    rows += [{"engine": "a < b", "us_per_token": value} for value in (8.0, 8.0, 8.0, 8.0)]
    machine = {"cpu": "a CPU", "num_cpus": 2, "date": "2026-11-21T10:00:00", "commit": "0123"}
    figure = FIGURES["engine without a model"]
    document = {"settings": {"requests": 3}, "machine": machine, "rows": rows}
    assert bars(document, figure) == {"tokenloom": 4.0, "a < b": 8.0}
    drawn = ET.fromstring(draw(document, figure))
    ours, theirs = (float(each.attrib["width"]) for each in drawn.iter("{http://www.w3.org/2000/svg}rect"))
    assert theirs == pytest.approx(2 * ours, abs=0.2)


def test_long_settings_take_several_lines_above_the_bars() -> None:
    machine = {"cpu": "a CPU", "num_cpus": 2, "date": "2026-11-21T10:00:00", "commit": "0123"}
    rows = [{"engine": name, "us_per_token": 1.0} for name in ("tokenloom", "another")]
    settings = {f"setting{i}": i for i in range(20)}
    document = {"settings": settings, "machine": machine, "rows": rows}
    drawn = ET.fromstring(draw(document, FIGURES["engine without a model"]))
    notes = [each for each in drawn.iter("{http://www.w3.org/2000/svg}text") if each.get("class") == "note"][:-1]
    assert ", ".join(f"{name} {i}" for name, i in settings.items()) == " ".join(str(each.text) for each in notes)
    assert max(len(str(each.text)) for each in notes) <= 110
    first = next(drawn.iter("{http://www.w3.org/2000/svg}rect"))
    assert max(float(each.attrib["y"]) for each in notes) < float(first.attrib["y"])


def test_columns_are_bars_if_nothing_else_names_them() -> None:
    rows = [{"turn": i, "again_tokenloom": i, "again_llama_server": 1} for i in range(5)]
    assert bars({"rows": rows}, FIGURES["conversation"]) == {"tokenloom": 2, "llama_server": 1}


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_the_committed_pictures_match_the_results(file: Path) -> None:
    document = json.loads(file.read_text())
    figure, picture = figure_of(document), file.with_suffix(".svg")
    if figure is not None:
        assert picture.read_text() == draw(document, figure)
        assert f"(benchmarks/{picture.name})" in (ROOT / "docs/reference/benchmarks.md").read_text(), "nobody sees it"
    else:
        assert not picture.exists()
    assert '"/' not in json.dumps(document["settings"]), "a path of some machine"
