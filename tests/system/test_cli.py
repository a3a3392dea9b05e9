"""The subcommands of engine-launch against one running engine, used like at a terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.tests.system.http_engine import KEY
from tokenloom.tests.system.launched import LaunchedEngine

DEADLINE_S = 30.0
BLOCK_SIZE = EngineConfig().block_size


def run(*arguments: str, text: str = "") -> tuple[int, str, str]:
    command = [sys.executable, "-m", "tokenloom.frontend.launch", *arguments]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=DEADLINE_S, cwd="/", env=environment
    )
    return done.returncode, done.stdout, done.stderr


def test_complete_continues_its_argument_or_standard_input(engine: LaunchedEngine) -> None:
    address = engine.address
    assert run("complete", "--address", address, "--temperature", "0", "The capital of France is") == (
        0,
        " Paris.\n",
        "",
    )
    assert run("complete", "--address", address, "--temperature", "0", text="The capital of Peru is\n")[1] == " Lima.\n"
    code, _, reason = run("complete", "--address", address, text="")
    assert code == 2 and "the prompt is empty" in reason


@pytest.mark.parametrize("words", ["completion bash", "--help", "chat --help"])
def test_a_closed_output_pipe_is_not_reported_as_an_error(words: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for reader in ("head -1", "head -1", "true"):  # head may exit before or after the last write
        command = f"{sys.executable} -m tokenloom.frontend.launch {words} | {reader}"
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=DEADLINE_S, cwd="/", env=environment
        )
        assert done.stderr == "" and bool(done.stdout) == (reader != "true")


def test_chat_keeps_its_turns_runs_commands_and_exits_at_end_of_input(engine: LaunchedEngine) -> None:
    address = engine.address
    lines = ["What is the capital of \\", "Peru?", "/stats", "/params temperature=9999", "/nonsense", "/reset", "/exit"]
    code, output, _ = run("chat", "--address", address, "--temperature", "0", text="\n".join(lines))
    assert code == 0
    assert "Lima" in output and "tokens/s" in output
    assert "temperature must be in [0, 100]" in output and "/nonsense is not a command" in output


def test_status_prints_text_or_json_and_fails_if_no_engine_runs(engine: LaunchedEngine) -> None:
    address = engine.address
    code, output, _ = run("status", address)
    assert code == 0 and output.startswith("tokenloom-demo: ready")
    code, output, _ = run("status", address, "--json")
    assert code == 0 and json.loads(output)["health"]["is_ready"]
    assert run("status", "ipc:///nowhere/there.sock", "--timeout-s", "0.3")[0] == 1
    assert run("status", "nowhere")[0] == 2


def test_an_interrupted_batch_requests_only_missing_answers(engine: LaunchedEngine, tmp_path: Path) -> None:
    url = engine.url
    requests = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "The", "max_tokens": 2}}
        for n in range(9)
    ]
    (tmp_path / "in").write_text("".join(json.dumps(each) + "\n" for each in requests))
    arguments = ("batch", str(tmp_path / "in"), str(tmp_path / "out"), "--url", url, "--api-key", KEY)
    code, _, reason = run(*arguments)
    assert code == 0, reason
    whole = (tmp_path / "out").read_bytes()
    assert sorted(json.loads(line)["custom_id"] for line in whole.splitlines()) == [f"r{n}" for n in range(9)]
    assert all(json.loads(line)["response"]["body"]["usage"]["completion_tokens"] == 2 for line in whole.splitlines())
    cut = len(whole) // 2
    (tmp_path / "out").write_bytes(whole[:cut])
    kept = whole[:cut][: whole[:cut].rfind(b"\n") + 1]
    assert run(*arguments)[0] == 0
    again = (tmp_path / "out").read_bytes()
    assert again.startswith(kept)
    assert sorted(json.loads(line)["custom_id"] for line in again.splitlines()) == [f"r{n}" for n in range(9)]


@pytest.mark.parametrize("own_engine", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_repeatedly_killed_batch_repeats_and_loses_no_line(
    engine: LaunchedEngine, tmp_path: Path, own_engine: bool
) -> None:
    url = engine.url
    names = [f"r{n}" for n in range(60)]
    body = {"prompt": "The capital of", "max_tokens": 30, "ignore_eos": True}
    requests = [{"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} for name in names]
    (tmp_path / "in").write_text("".join(json.dumps(each) + "\n" for each in requests))
    output = tmp_path / "out"
    arguments = ["batch", str(tmp_path / "in"), str(output), "--concurrency", "4"]
    arguments += [] if own_engine else ["--url", url, "--api-key", KEY]
    output.touch()
    for wanted in (10, 30):
        batch = subprocess.Popen([sys.executable, "-m", "tokenloom.frontend.launch", *arguments], cwd="/")
        started = psutil.Process(batch.pid)
        family: list[psutil.Process] = []
        deadline = time.monotonic() + DEADLINE_S
        while output.read_bytes().count(b"\n") < wanted:
            assert batch.poll() is None and time.monotonic() < deadline
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
    assert sorted(json.loads(line)["custom_id"] for line in whole.splitlines()) == sorted(names)
    assert all(json.loads(line)["response"]["status_code"] == 200 for line in whole.splitlines())


def shown(http: httpx2.Client, is_there: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Poll the dashboard's data until `is_there` holds; the core reports a few times a second."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_there(data := dict(http.get("/dashboard/data").json())):
        assert time.monotonic() < deadline, data
    return data


def test_the_dashboard_is_self_contained_and_lists_and_aborts_open_requests(http: httpx2.Client) -> None:
    page = http.get("/dashboard")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"src=|url\(|@import|https?://", page.text)
    num_aborted = http.get("/dashboard/data").json()["ended"].get("abort", 0)
    body = {"prompt": "The", "max_tokens": 2000, "ignore_eos": True, "stream": True, "request_id": "shown"}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        next(lines)
        (row,) = shown(http, lambda data: data["open"][0]["num_tokens"] > BLOCK_SIZE)["open"]
        assert "shown" not in str(row) and row["state"] == "running"
        assert http.post("/dashboard/abort", json={"key": "0"}).status_code == 404
        assert http.post("/dashboard/abort", json={"key": row["key"]}).status_code == 200
        *_, last = lines
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    data = shown(http, lambda data: max(data["kv_map"]) == 1)  # computed blocks are cached and unused
    named = {(phase["process"], phase["name"]) for phase in data["phases"]}
    assert {("worker 0", "load weights"), ("core", "workers joined"), ("frontend", "tokenizer loaded")} <= named
    assert data["num_open"] == 0 and data["ended"]["abort"] == num_aborted + 1
    assert all(len(counts) == len(data["bounds"]) + 1 for counts in data["histograms"].values())
    assert http.post("/dashboard/abort", json={"key": row["key"]}).status_code == 404


def test_a_new_frontend_serves_the_port_of_the_killed_one(engine: LaunchedEngine, http: httpx2.Client) -> None:
    engine.child("frontend").kill()
    while True:
        try:
            if http.get("/ready").status_code == 200:
                break
        except httpx2.TransportError:
            assert engine.process.poll() is None
    answer = http.post("/v1/completions", json={"prompt": "The capital of France is", "temperature": 0})
    assert answer.json()["choices"][0]["text"] == " Paris."
    engine.child("frontend")
