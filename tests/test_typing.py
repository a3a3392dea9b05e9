"""Types of the public API, as mypy and pyright read them in a program of a user."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tokenloom.tests.system.client_environments import CLIENTS, python_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]  # mypy reads every room; pyright is installed
ROOT = Path(__file__).parents[1]
PROGRAM = CLIENTS / "typed_program.py"
DEADLINE_S = 600.0


@pytest.fixture
def search_path(tmp_path: Path) -> Path:
    """Return a folder with the program, in which the package has its name."""
    (tmp_path / "tokenloom").symlink_to(ROOT)
    (tmp_path / PROGRAM.name).write_bytes(PROGRAM.read_bytes())
    return tmp_path


def wrong_lines() -> list[int]:
    lines = PROGRAM.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, start=1) if line.endswith("# wrong")]


def output_of(command: list[str], cwd: Path) -> str:
    environment = os.environ | {"MYPYPATH": str(cwd)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=cwd, env=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_mypy_reports_the_wrong_lines_and_no_others(search_path: Path) -> None:
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(search_path / "cache")]
    said = output_of([sys.executable, "-m", "mypy", *options, PROGRAM.name], search_path)
    assert sorted({int(line) for line in re.findall(r":(\d+): error:", said)}) == wrong_lines(), said


def test_pyright_reports_the_wrong_lines_and_no_others(search_path: Path) -> None:
    settings = {"extraPaths": [str(search_path)], "pythonVersion": "3.11", "include": [PROGRAM.name]}
    packages = Path(sys.prefix)  # msgspec's types
    settings |= {"venvPath": str(packages.parent), "venv": packages.name}
    (search_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    said = output_of([python_of("pyright"), "-m", "pyright", "--outputjson", "-p", str(search_path)], search_path)
    found = json.loads(said[said.index("{") :])["generalDiagnostics"]
    lines = {each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"}
    assert sorted(lines) == wrong_lines(), found
