"""Tables are aligned, percentiles equal numpy's, and a report records place and time of the measurement."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tokenloom.scripts.bench.report import Report, format_cell, percentile, table


def test_percentiles_interpolate_between_the_nearest_two_values() -> None:
    assert percentile([3.0, 1.0, 2.0, 5.0], 50) == 2.5 and percentile([1.0, 2.0], 99) == pytest.approx(1.99)
    assert math.isnan(percentile([], 50))


def test_a_table_has_an_aligned_column_for_each_name() -> None:
    lines = table([{"name": "a", "rate": 12.345}, {"name": "long", "rate": 123456.7, "late": None}]).splitlines()
    assert lines[0].split() == ["name", "rate", "late"]
    assert {len(line.split("  ")[0]) for line in lines} == {4, 1}
    assert lines[2].split() == ["a", "12.3"] and lines[3].split() == ["long", "123,457"]
    assert lines[0].index("rate") + 4 == lines[2].index("12.3") + 4 == lines[3].index("123,457") + 7


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (3, "3"), (0.01234, "0.0123"), (999.94, "999.9"), (1e5, "100,000")]
)
def test_numbers_keep_three_significant_digits(value: float | None, text: str) -> None:
    assert format_cell(value) == text


def test_the_json_holds_rows_settings_machine_and_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("speed", {"model": "/models/demo.gguf"})
    report.add(round=1, seconds=0.5)
    report.note("ratio", 2.0)
    report.publish(tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["rows"] == [{"round": 1, "seconds": 0.5}] and written["notes"] == {"ratio": 2.0}
    assert written["settings"] == {"model": "demo.gguf"} and written["benchmark"] == "speed"
    assert written["machine"]["num_cpus"] >= 1 and written["machine"]["versions"]["msgspec"]
    assert "ratio: 2" in capsys.readouterr().out
