"""The documents' examples run unchanged against one engine with a key."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tokenloom.tests.system.http_engine import KEY
from tokenloom.tests.system.launched import LaunchedEngine

FOLDER = Path(__file__).resolve().parents[2] / "docs/learn/examples"
ENGINE = {"attach.py", "openai_chat.py", "structured.py", "requests.sh"}  # those that need a running engine


def test_every_example_has_a_test_here() -> None:
    assert {path.name for path in FOLDER.iterdir()} == ENGINE | {"generate.py"}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("attach.py", ["Paris", "Peru →  Lima", "Egypt →  Cairo"]),
        ("openai_chat.py", ["Lima", "2 vectors of"]),
        ("structured.py", ["Oslo", "'city': '", "'unit': '"]),
    ],
)
def test_an_example_prints_the_expected_output(
    engine: LaunchedEngine,
    name: str,
    wanted: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [engine.address] if name == "attach.py" else [f"{engine.url}/v1", KEY]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert [text for text in wanted if text not in printed] == [], printed


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_examples_succeed(engine: LaunchedEngine) -> None:
    command = ["bash", str(FOLDER / "requests.sh"), engine.url, KEY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for text in ("Paris", "[DONE]", '"embedding":"', '"tokens":[', '"status":"ok"'):
        assert text in done.stdout


def test_an_example_with_its_own_engine_generates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    runpy.run_path(str(FOLDER / "generate.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "Japan is →  Tokyo." in printed and "Oslo" in printed and "256 numbers" in printed
