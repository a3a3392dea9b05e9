"""`ls` lists what is in the cache or in folders, with format and fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenloom.frontend.checkpoint.machine import Fit
from tokenloom.frontend.cli.models.ls import Row, table
from tokenloom.tests.frontend.cli.models.hub_commands import Run
from tokenloom.tests.support.fake_hub import FakeHub


def test_the_models_of_the_cache_have_a_line_each(hub: FakeHub, run: Run, tmp_path: Path) -> None:
    assert run("ls")[1] == f"no model in {tmp_path / 'hub'}: engine-launch pull owner/name fetches one\n"
    for name in ("org/tiny", "org/gguf:Q8_0", "org/gguf:F16"):
        assert run("pull", name)[0] == 0
    head, f16, q8, tiny, last = run("ls")[1].splitlines()
    assert head.split() == ["MODEL", "SIZE", "FORMAT", "USED", "FITS"]
    assert f16.startswith("org/gguf:F16 ") and "GGUF F16" in f16
    assert q8.startswith("org/gguf:Q8_0 ") and "GGUF Q8_0" in q8
    assert tiny.startswith("org/tiny ") and "safetensors bfloat16" in tiny and " ago " in tiny
    assert all(" yes, " in line and " GiB" in line for line in (f16, q8, tiny))
    assert last.startswith("this machine: ")
    rows = json.loads(run("ls", "--json")[1])
    assert [row["model"] for row in rows] == ["org/gguf:F16", "org/gguf:Q8_0", "org/tiny"]
    assert rows[2]["facts"]["architecture"] == "LlamaForCausalLM" and rows[2]["facts"]["template"] is True


def test_folders_are_listed_with_the_files_and_checkpoints_in_them(
    hub: FakeHub, run: Run, tmp_path: Path, models: dict[str, dict[str, bytes]]
) -> None:
    folder = tmp_path / "mine"
    for name, files in (("tiny", models["org/tiny"]), ("below", models["org/gguf"]), (".", models["org/gguf"])):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / name / file).write_bytes(content)
    lines = run("ls", str(folder))[1].splitlines()
    paths = ["below/m-F16.gguf", "below/m-Q8_0.gguf", "m-F16.gguf", "m-Q8_0.gguf", "tiny"]
    assert [line.split()[0] for line in lines[1:-1]] == [str(folder / path) for path in paths]
    assert run("ls", str(folder / "tiny"))[1].splitlines()[1].startswith(str(folder / "tiny"))
    assert run("ls", str(folder / "m-F16.gguf"))[1].splitlines()[1].startswith(str(folder / "m-F16.gguf"))
    assert run("ls", str(tmp_path / "none"))[0] == 2


def test_a_model_that_cannot_be_served_is_listed_with_the_reason(hub: FakeHub, run: Run) -> None:
    assert run("pull", "org/odd:F16")[0] == 0
    line = run("ls")[1].splitlines()[1]
    assert line.startswith("org/odd:F16 ") and " is no GGUF file: it begins with" in line


@pytest.mark.parametrize("length", [10, 300])
def test_a_long_reason_is_cut(length: int) -> None:
    (_, line) = table([Row(model="m", num_bytes=1, used_at=0.0, problem="x" * length)], 90.0)
    assert line.endswith("x" * 10 if length == 10 else "x…") and len(line) < 120 and "1 min ago" in line


def test_columns_are_aligned() -> None:
    rows = [
        Row(model="a", num_bytes=5 << 30, used_at=0.0, fit=Fit(True, "", 1 << 30, 2 << 30)),
        Row(model="long/name", num_bytes=1, used_at=0.0, fit=Fit(False, "", 3 << 30, 2 << 30)),
    ]
    head, first, second = table(rows, 10.0)
    assert head.index("FITS") == first.index("yes") == second.index("no")
