"""`scripts/environment.sh` finds a recent enough Python, or reports in one line that there is none.

The Pythons here are scripts that print a version and record their calls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Create a checkout with only the setup files; Python calls are recorded in `calls`."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/environment.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "scripts/use").write_text('set -euo pipefail\nsource "$(dirname "$0")/environment.sh"\n')
    return tmp_path


def add_python(checkout: Path, name: str, version: str) -> Path:
    """Add a Python that creates a .venv with its own version."""
    path = checkout / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"#!/bin/sh\n[ \"$1\" != -c ] || exec echo {version}\necho '{version}' \"$@\" >>'{checkout}/calls'\n"
        f"[ \"$2\" != venv ] || {{ rm -rf .venv; mkdir -p .venv/bin && cp '{path}' .venv/bin/python; }}\n"
    )
    path.chmod(0o755)
    return path


def set_up(checkout: Path, python: Path | str = "") -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{checkout}/path:{os.environ['PATH']}", **({"PYTHON": str(python)} if python else {})}
    command = ["bash", "scripts/use"]
    return subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, encoding="utf-8", timeout=30, check=False
    )


def calls(checkout: Path) -> list[str]:
    """Return the recorded calls of Pythons, without those for the version."""
    path = checkout / "calls"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("version", ["3.10", "3.9", "2.7"])
def test_a_too_old_python_is_refused_before_any_download(checkout: Path, version: str) -> None:
    python = add_python(checkout, "old", version)
    done = set_up(checkout, python)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and f"needs Python 3.11 or newer, {python} is {version}" in line
    assert calls(checkout) == [] and not (checkout / ".venv").exists()


def test_a_broken_python_is_named(checkout: Path) -> None:
    done = set_up(checkout, "python3.99")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "python3.99 does not run" in line


@pytest.mark.parametrize("version", ["3.11", "3.14"])
def test_a_second_setup_does_nothing(checkout: Path, version: str) -> None:
    add_python(checkout, "path/python3", version)
    assert set_up(checkout).returncode == 0
    assert [call.split()[:3] for call in calls(checkout)] == [[version, "-m", "venv"], [version, "-m", "pip"]]
    assert set_up(checkout).stdout == "" and len(calls(checkout)) == 2


def test_a_venv_with_a_missing_or_too_old_python_is_recreated(checkout: Path) -> None:
    add_python(checkout, "path/python3", "3.13")
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/bin/python").symlink_to("/nowhere/python3.11")
    assert set_up(checkout).returncode == 0
    assert "3.13 -m venv --clear .venv" in calls(checkout)
    (checkout / "calls").unlink()
    add_python(checkout, ".venv/bin/python", "3.10")
    (checkout / "path/python3").unlink()
    add_python(checkout, "path/python3", "3.12")
    assert set_up(checkout).returncode == 0
    assert "3.12 -m venv --clear .venv" in calls(checkout)


def test_the_venv_is_created_with_the_given_python(checkout: Path) -> None:
    add_python(checkout, "path/python3", "3.11")
    assert set_up(checkout).returncode == 0
    other = add_python(checkout, "other", "3.14")
    assert set_up(checkout, other).returncode == 0
    assert "3.14 -m venv --clear .venv" in calls(checkout)
    assert set_up(checkout, other).stdout == ""


def test_an_incomplete_venv_is_removed(checkout: Path) -> None:
    """Debian's Python without python3-venv writes the folder before it fails."""
    python = add_python(checkout, "path/python3", "3.11")
    python.write_text(python.read_text() + "exit 1\n")
    assert set_up(checkout).returncode == 1
    assert not (checkout / ".venv").exists()
