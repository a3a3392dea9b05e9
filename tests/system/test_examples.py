"""The documents' examples run unchanged against one engine with a key."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenloom.tests.system.http_engine import KEY
from tokenloom.tests.system.launched import LaunchedEngine

FOLDER = Path(__file__).resolve().parents[2] / "docs/learn/examples"
DEADLINE_S = 60.0
ENGINE = {"attach.py", "openai_chat.py", "structured.py", "tools.py", "requests.sh"}  # those that need a running engine


def test_every_example_has_a_test_here() -> None:
    assert {path.name for path in FOLDER.iterdir()} == ENGINE | {"generate.py"}


def test_the_readmes_second_program_attaches_to_the_engine_of_the_first(tmp_path: Path) -> None:
    text = (FOLDER.parents[2] / "README.md").read_text(encoding="utf-8")
    (block,) = (each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "listen=" in each)
    block = block.replace("/tmp/engine.sock", f"{tmp_path}/engine.sock")
    imports, starts, attaches = block.split("\n\n")
    names: dict[str, Any] = {}
    exec(
        f"{imports}\n" + starts.replace('"Qwen/Qwen3-0.6B", max_model_len=8192', "num_threads=1, num_kv_blocks=64"),
        names,
    )
    with names["llm"] as llm:
        assert repr(llm) == f"<LLM demo at ipc://{tmp_path}/engine.sock>"
        command = [sys.executable, "-P", "-c", f"{imports}\n{attaches}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0 and "Paris" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("attach.py", ["Paris", "Peru →  Lima", "Egypt →  Cairo"]),
        ("openai_chat.py", ["Lima", "2 vectors of"]),
        ("structured.py", ["Oslo", "'city': '", "'unit': '"]),
        ("tools.py", ['weather {"city": "', "<tool_call>", "17 degrees in "]),
    ],
)
def test_an_example_prints_the_expected_output(
    engine: LaunchedEngine,
    name: str,
    wanted: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [engine.address] if name in ("attach.py", "tools.py") else [f"{engine.url}/v1", KEY]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert [text for text in wanted if text not in printed] == [], printed


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_examples_succeed(engine: LaunchedEngine) -> None:
    command = ["bash", str(FOLDER / "requests.sh"), engine.url, KEY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
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
