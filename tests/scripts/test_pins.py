"""The dependencies of the scripts can be installed: the pins agree with one another on every supported Python.

uv resolves for Pythons that are not installed; the environment's own indexes and wheel folders are removed, so that the
result is that of an unconfigured machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT_S = 240
PLATFORM = "x86_64-manylinux_2_31"  # Debian 11; llguidance has no wheels for older ones
LEFT_TO_TORCH = re.compile(r"(cuda|nvidia)-")  # torch's metadata pin a version of each
LEFT_TO_PIP = {"setuptools"}


def promised_pythons() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))


def versions(lines: str) -> dict[str, str]:
    """Return the version by name, as indexes write it."""
    pins = (line.split(";")[0].strip().partition("==") for line in lines.splitlines() if "==" in line)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in pins}


def resolve(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Resolve with uv from the public index alone; its cache is in `folder`."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert uv is not None, "uv is one of the test dependencies"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    command = [uv, "pip", "compile", "--no-config", "--quiet", "--no-header", "--no-annotate", "--no-build"]
    command += ["--cache-dir", str(folder / "cache"), "--python-platform", PLATFORM, *options]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, encoding="utf-8", timeout=TIMEOUT_S, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return uv's working folder; skip if it cannot reach the index."""
    folder = tmp_path_factory.mktemp("pins")
    (folder / "probe.in").write_text("iniconfig\n", encoding="utf-8")
    probe = resolve(folder, "probe.in")
    if probe.returncode:
        pytest.skip(f"no package index can be reached: {probe.stderr.strip().splitlines()[-1]}")
    return folder


def test_every_file_names_the_same_oldest_python() -> None:
    oldest = promised_pythons()[0]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={oldest}"' in project and f'target-version = "py{oldest.replace(".", "")}"' in project
    assert f'oldest="{oldest}"' in (ROOT / "scripts/environment.sh").read_text(encoding="utf-8")
    assert f"Python {oldest} to {promised_pythons()[-1]}" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("python", promised_pythons())
def test_the_pins_resolve_from_the_public_index_alone(python: str, folder: Path) -> None:
    constraints = ROOT / "constraints.txt"
    project = (str(ROOT / "pyproject.toml"), "--extra", "test", "--constraints", str(constraints))
    done = resolve(folder, *project, "--python-version", python)
    assert done.returncode == 0, done.stderr
    pins = versions(constraints.read_text(encoding="utf-8"))
    free = {name for name in versions(done.stdout).keys() - pins.keys() if not LEFT_TO_TORCH.match(name)}
    assert free <= LEFT_TO_PIP, f"not in constraints.txt: {free}"
