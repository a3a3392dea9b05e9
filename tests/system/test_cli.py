"""The subcommands of engine-launch against one running engine, used like at a terminal."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from tokenloom.frontend.launch import main
from tokenloom.tests.system.http_engine import KEY
from tokenloom.tests.system.launched import LaunchedEngine

DEADLINE_S = 30.0
COMMAND = (sys.executable, "-m", "tokenloom.frontend.launch")


class Run(Protocol):
    def __call__(self, *arguments: str, text: str = "") -> tuple[int, str, str]: ...


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process, with a text as its input; return its exit code and what it printed."""

    def run(*arguments: str, text: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code = main(arguments)
        return code, *capsys.readouterr()

    return run


def test_complete_continues_its_argument_or_standard_input(engine: LaunchedEngine, run: Run) -> None:
    greedy = ("complete", "--address", engine.address, "--temperature", "0")
    assert run(*greedy, "The capital of France is") == (0, " Paris.\n", "")
    piped = subprocess.run([*COMMAND, *greedy], input=b"The capital of Peru is\n", capture_output=True, cwd="/")
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, b" Lima.\n", b"")
    code, _, reason = run("complete", "--address", engine.address)
    assert code == 2 and "the prompt is empty" in reason


@pytest.mark.parametrize("reader", ["head -1", "true"])
@pytest.mark.parametrize(
    "words", ["completion bash", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("--help", "chat --help"))]
)
def test_a_closed_output_pipe_is_not_reported_as_an_error(words: str, reader: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = ["bash", "-c", f"{' '.join(COMMAND)} {words} | {reader}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd="/", env=environment)
    assert done.stderr == "" and bool(done.stdout) == (reader != "true")


def test_chat_keeps_its_turns_runs_commands_and_exits_at_end_of_input(engine: LaunchedEngine, run: Run) -> None:
    lines = ["What is the capital of \\", "Peru?", "/stats", "/params temperature=9999", "/nonsense", "/reset", "/exit"]
    code, output, _ = run("chat", "--address", engine.address, "--temperature", "0", text="\n".join(lines))
    assert code == 0
    assert "Lima" in output and "tokens/s" in output
    assert "temperature must be in [0, 100]" in output and "/nonsense is not a command" in output


def test_status_prints_text_or_json_and_fails_if_no_engine_runs(engine: LaunchedEngine, run: Run) -> None:
    code, output, _ = run("status", engine.address)
    assert code == 0 and output.startswith("tokenloom-demo: ready")
    code, output, _ = run("status", engine.address, "--json")
    assert code == 0 and json.loads(output)["health"]["is_ready"]
    assert run("status", "ipc:///nowhere/there.sock", "--timeout-s", "0.3")[0] == 1
    assert run("status", "nowhere")[0] == 2


def test_commands_without_an_address_use_the_engine_that_runs(
    engine: LaunchedEngine, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(engine.runtime))
    code, output, _ = run("ps")
    assert code == 0 and "tokenloom-demo" in output and engine.url in output
    assert run("status")[1].startswith("tokenloom-demo: ready")
    assert run("complete", "--temperature", "0", "The capital of France is")[1] == " Paris.\n"
    assert "Lima" in run("chat", "--temperature", "0", text="What is the capital of Peru?\n/exit\n")[1]
    assert "Lima" in run("chat", "demo", "--temperature", "0", text="What is the capital of Peru?\n/exit\n")[1]
    assert "finished" in run("bench", "serve", "--num-requests", "2", "--rate", "inf", "--in", "4", "--out", "2")[1]
    names, arguments = batch_file(tmp_path, 2, max_tokens=2)
    assert run(*arguments, "--api-key", KEY)[0] == 0
    check_answers((tmp_path / "out").read_bytes(), names, 2)


def test_an_engine_of_another_user_is_used_over_http_alone(
    engine: LaunchedEngine, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert "no engine of this user runs" in run("ps")[1]
    assert run("status")[0] == 2
    code, output, _ = run("status", engine.url, "--api-key", KEY)
    assert code == 0 and output.startswith("tokenloom-demo: ok")
    greedy = ("--api-key", KEY, "--temperature", "0")
    assert run("complete", "--address", engine.url, *greedy, "The capital of France is")[1] == " Paris.\n"
    assert "Lima" in run("chat", f"{engine.url}/v1", *greedy, text="What is the capital of Peru?\n/exit\n")[1]
    assert run("chat", engine.url, "--api-key", "wrong", text="x\n")[0] == 2


def batch_file(folder: Path, count: int, **fields: object) -> tuple[list[str], list[str]]:
    """Write requests; return their names, and the command that answers them into the file `out`."""
    body = {"prompt": "The capital of", "ignore_eos": True} | fields
    names = [f"r{n}" for n in range(count)]
    lines = [{"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} for name in names]
    (folder / "in").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return names, ["batch", str(folder / "in"), str(folder / "out")]


def check_answers(output: bytes, names: list[str], num_tokens: int) -> None:
    answers = [json.loads(line) for line in output.splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(names)
    assert all(answer["response"]["body"]["usage"]["completion_tokens"] == num_tokens for answer in answers)


def test_an_interrupted_batch_requests_only_missing_answers(engine: LaunchedEngine, tmp_path: Path, run: Run) -> None:
    names, arguments = batch_file(tmp_path, 9, max_tokens=2)
    arguments += ["--url", engine.url, "--api-key", KEY]
    assert run(*arguments)[0] == 0
    whole = (tmp_path / "out").read_bytes()
    check_answers(whole, names, 2)
    cut = whole[: len(whole) // 2]
    (tmp_path / "out").write_bytes(cut)
    assert run(*arguments)[0] == 0
    again = (tmp_path / "out").read_bytes()
    assert again.startswith(cut[: cut.rfind(b"\n") + 1])
    check_answers(again, names, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("own_engine", [False, True])
def test_a_repeatedly_killed_batch_repeats_and_loses_no_line(
    engine: LaunchedEngine, tmp_path: Path, own_engine: bool, run: Run
) -> None:
    names, arguments = batch_file(tmp_path, 60, max_tokens=30)
    arguments += ["--concurrency", "4", *([] if own_engine else ["--url", engine.url, "--api-key", KEY])]
    output = tmp_path / "out"
    output.touch()
    for wanted in (10, 30):
        batch = subprocess.Popen([*COMMAND, *arguments], cwd="/")
        started = psutil.Process(batch.pid)
        family: list[psutil.Process] = []
        while output.read_bytes().count(b"\n") < wanted:
            assert batch.poll() is None
            family = started.children(recursive=True) or family
        batch.kill()
        assert batch.wait(DEADLINE_S) == -signal.SIGKILL
        assert bool(family) == own_engine
        assert psutil.wait_procs(family, timeout=DEADLINE_S)[1] == []  # its engine ends with it
        kept = output.read_bytes()
        assert wanted <= kept.count(b"\n") < len(names)
    assert run(*arguments)[0] == 0
    whole = output.read_bytes()
    assert whole.startswith(kept[: kept.rfind(b"\n") + 1])
    check_answers(whole, names, 30)
