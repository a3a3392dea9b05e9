"""Environments of third-party clients: one for each, created at its first use and kept in the user's cache.

tests/clients pins the versions: a line of requirements.txt for each Python client, package-lock.json for JavaScript.
Those of coding agents are in `frontend/cli/agents/`, with the tokens that were counted with them.
Each has its own environment, separate from .venv, since they need different versions of the same packages.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CLIENTS = Path(__file__).parents[1] / "clients"
HOME = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tokenloom-clients"
INSTALL_S = 600.0
NO_INDEX = ("connection broken by", "Temporary failure", "Name or service not known", "ENOTFOUND", "EAI_AGAIN",
            "ECONNREFUSED", "ETIMEDOUT", "Failed to establish a new connection", "Network is unreachable")  # fmt: skip


def python_of(client: str) -> str:
    """Return the Python of an environment with `client`, the name of a line in requirements.txt."""
    requirements = _requirements(client)
    folder = HOME / _name(client, requirements + sys.version)
    python = folder / "bin" / "python"
    if not _is_done(folder):
        _install([sys.executable, "-m", "venv", str(folder)], folder)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _install([*pip, *requirements.split()], folder)
        _done(folder)
    return str(python)


def version_of(client: str) -> str:
    """Return the version of a Python client."""
    return _requirements(client).split()[0].rpartition("==")[2]


def _requirements(client: str) -> str:
    """Return a client's line of requirements.txt."""
    lines = (CLIENTS / "requirements.txt").read_text(encoding="utf-8").splitlines()
    (found,) = (line for line in lines if line.split("==")[0].split("[")[0] == client)
    return found


def node_folder() -> Path:
    """Return a folder with tests/clients/*.mjs beside the packages of its package-lock.json."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = HOME / _name("node", (CLIENTS / "package-lock.json").read_text(encoding="utf-8"))
    if not _is_done(folder):
        folder.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(CLIENTS / name, folder)
        _install(["npm", "ci", "--no-audit", "--no-fund", "--prefix", str(folder)], folder)
        _done(folder)
    for script in CLIENTS.glob("*.mjs"):
        shutil.copy(script, folder)
    return folder


def agent_folder(package: str, version: str) -> Path:
    """Return a folder with the programs of a coding agent's npm package."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = HOME / _name(package.rpartition("/")[2], f"{package}@{version}")
    if not _is_done(folder):
        folder.mkdir(parents=True)
        (folder / "package.json").write_text("{}")
        _install(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), f"{package}@{version}"], folder)
        script = folder / "node_modules" / package / "install.cjs"  # puts the program of this machine in place
        if script.exists():
            _install(["node", str(script)], folder)
        _done(folder)
    return folder / "node_modules" / ".bin"


def _name(client: str, wanted: str) -> str:
    return f"{client}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"


def _is_done(folder: Path) -> bool:
    """Return whether the installation is complete; remove an incomplete one."""
    if (folder / "done").exists():
        return True
    shutil.rmtree(folder, ignore_errors=True)
    return False


def _done(folder: Path) -> None:
    (folder / "done").touch()


def _install(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        said = done.stdout + done.stderr
        if any(sign in said for sign in NO_INDEX):
            pytest.skip(f"the package index cannot be reached: {said.strip().splitlines()[-1]}")
        pytest.fail(f"{' '.join(command)} failed: {said[-3000:]}")
