"""What the documents name exists: files, options, links, public names."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

import tokenloom
from tokenloom.frontend.args import add_engine_arguments
from tokenloom.ipc.config import EngineConfig

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{name}.md" for name in ("architecture", "operations", "openai", "conformance", "benchmarks")),
)
ROOMS = ("core", "frontend", "ipc", "kernels", "workers", "tests", "scripts", "docs", "demo")
OTHERS_FLAGS = {"--slow", "--config", "--help"}  # of scripts/test and of every command


@pytest.fixture(params=DOCUMENTS)
def text(request: pytest.FixtureRequest) -> str:
    return (ROOT / request.param).read_text()


def test_every_path_exists(text: str) -> None:
    paths = re.findall(rf"(?<![\w/.])(?:{'|'.join(ROOMS)})/[\w/.*…-]*[\w*…]", text)
    patterns = {path for path in paths if re.search(r"[*…]", path)}  # scripts/bench_*.py
    assert [path for path in set(paths) - patterns if not (ROOT / path).exists()] == []


def test_every_link_leads_somewhere(text: str, request: pytest.FixtureRequest) -> None:
    folder = (ROOT / request.node.callspec.params["text"]).parent
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert [link for link in links if not (folder / link).exists()] == []


def test_every_option_of_the_command_exists() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    known = {flag for action in parser._actions for flag in action.option_strings} | OTHERS_FLAGS
    for name in ("docs/operations.md", "docs/architecture.md"):
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / name).read_text()))
        assert named <= known, f"{name}: {named - known}"


def test_the_unit_and_the_manifest_name_what_exists_and_leave_time_to_drain() -> None:
    unit, manifest = ((ROOT / "docs/deploy" / name).read_text() for name in ("tokenloom.service", "kubernetes.yaml"))
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    known = {flag for action in parser._actions for flag in action.option_strings} | OTHERS_FLAGS
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", unit + manifest)) <= known
    served = set(re.findall(r'Endpoint\("(/\w+)"', (ROOT / "frontend/server_admin.py").read_text()))
    probes = dict(re.findall(r"(\w+Probe): \{httpGet: \{path: (/\w+),", manifest))
    assert probes.keys() == {"startupProbe", "readinessProbe", "livenessProbe"} and set(probes.values()) <= served
    grace_s = re.findall(r"(?:TimeoutStopSec=|terminationGracePeriodSeconds: )(\d+)", unit + manifest)
    assert len(grace_s) == 2 and all(int(each) > EngineConfig().drain_timeout_s for each in grace_s)


def test_options_of_the_benchmarks_exist() -> None:
    text = (ROOT / "docs/benchmarks.md").read_text()
    for script, rest in re.findall(r"`(scripts/bench_\w+\.py)([^`]*)`", text):
        source = (ROOT / script).read_text()
        assert all(f'"{flag}"' in source for flag in re.findall(r"--[a-z-]+", rest)), (script, rest)


def test_the_readme_imports_public_names_only() -> None:
    lines = re.findall(r"from tokenloom import (.+)", (ROOT / "README.md").read_text())
    assert lines and {name.strip() for line in lines for name in line.split(",")} <= set(tokenloom.__all__)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
