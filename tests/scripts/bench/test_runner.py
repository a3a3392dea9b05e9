"""Options of a case are read by their defaults, its report names the numbers among them, and nothing stays behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenloom.scripts.bench.runner import REQUIRED, Case, Setup, read_options, run_case


def halves(text: str) -> list[int]:
    return [int(each) // 2 for each in text.split(",")]


OPTIONS: dict[str, tuple[Any, ...]] = {
    "place": (REQUIRED, "a folder", Path),
    "--rows": ([1, 2], "of a step"),
    "--halves": ((3,), "of numbers", halves),
    "--in": (16,),
    "--share": (0.5,),
    "--peer": (None, "its Python"),
    "--quick": (False,),
    "--warm": (True,),
}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("here", {"rows": [1, 2], "halves": (3,), "num_in": 16, "peer": None, "quick": False, "warm": True}),
        ("here --rows 5 --halves 8,10 --in 3 --share 2", {"rows": [5], "halves": [4, 5], "num_in": 3, "share": 2.0}),
        ("here --peer x --quick --no-warm", {"peer": "x", "quick": True, "warm": False, "place": Path("here")}),
    ],
)
def test_an_option_has_the_type_of_its_default(words: str, expected: dict[str, object]) -> None:
    found = vars(read_options(None, OPTIONS, words.split()))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("words", ["", "here --in x", "here --rows"])
def test_a_command_line_without_what_is_needed_is_refused(words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        read_options(None, OPTIONS, words.split())
    assert ended.value.code == 2


def test_a_case_is_measured_and_published_with_its_numbers_once_its_resources_are_closed(tmp_path: Path) -> None:
    order: list[str] = []

    def measure(setup: Setup) -> None:
        setup.stack.callback(order.append, "closed")
        setup.report.add(rows=setup.arguments.rows[0])
        order.append("measured")

    case = Case("things", measure, OPTIONS, model="", rounds=3)
    words = ["somewhere", "--peer", "/usr/bin/python", "--json", str(tmp_path / "out.json")]
    assert run_case(case, "Measure things.", "bench things", words) == 0
    document = json.loads((tmp_path / "out.json").read_text())
    settings = {"in": 16, "rounds": 3, "rows": [1, 2], "halves": [3], "share": 0.5, "warm": True}
    assert document["settings"] == settings and document["rows"] == [{"rows": 1}] and order == ["measured", "closed"]


def test_a_case_with_a_model_takes_the_flags_of_the_engine() -> None:
    found: list[Setup] = []
    case = Case("things", found.append, num_requests=4, dtype="bfloat16")
    run_case(case, None, "bench things", ["demo", "2", "7", "--max-num-seqs", "9"])
    (setup,) = found
    assert setup.options == {"speculation": "off", "max_num_seqs": 9, "dtype": "bfloat16"}
    assert (setup.workload.num_requests, setup.workload.num_in, setup.workload.num_out) == (2, 7, 64)
