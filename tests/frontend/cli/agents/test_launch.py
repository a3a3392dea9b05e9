"""`engine-launch launch`: the set-up of a coding agent, as it gets it and as it is printed, and the errors."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tokenloom.frontend.cli.agents.agent import Place
from tokenloom.frontend.cli.agents.claude import CLAUDE
from tokenloom.frontend.cli.agents.codex import CODEX

DEADLINE_S = 60.0
KEY = "sk-loom"
STAND_IN = """#!/bin/sh
printf '%s\\n' "$@"
env
exit 7
"""  # prints its arguments, a line each, and its environment


class _Engine(ThreadingHTTPServer):
    """Lists a model with a context of `max_model_len` tokens to callers with the key."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.max_model_len: int | None = 32768
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: _Engine

    def do_GET(self) -> None:
        is_friend = self.headers.get("authorization") == f"Bearer {KEY}"
        self.send_response(200 if is_friend else 401)
        self.end_headers()
        card = {"id": "owner/m 1", "max_model_len": self.server.max_model_len}
        self.wfile.write(json.dumps({"data": [card]} if is_friend else {"error": {"message": "no key"}}).encode())

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def engine() -> Iterator[_Engine]:
    server = _Engine()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with stand-ins for both agents, an empty home and a folder for files."""
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    for agent in (CLAUDE, CODEX):
        (tmp_path / agent.program).write_text(STAND_IN)
        (tmp_path / agent.program).chmod(0o755)
    return tmp_path


def launched(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command with `folder` before the system's programs."""
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": f"{folder}/home", "TMPDIR": f"{folder}/tmp"} | variables
    command = [sys.executable, "-P", "-m", "tokenloom.frontend.launch", "launch", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)


def variables_of(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def test_claude_gets_the_engine_by_variables_and_its_own_arguments(engine: _Engine, folder: Path) -> None:
    more = {"ANTHROPIC_API_KEY": "sk-other", "TOKENLOOM_API_KEY": KEY}
    done = launched(folder, "claude", "--address", f"{engine.url}/v1/", "--", "-p", "Hello there", **more)
    assert done.returncode == 7 and done.stdout.startswith("-p\nHello there\n"), done.stderr
    assert done.stderr == f"Claude Code uses owner/m 1 at {engine.url} (32768 tokens)\n"
    seen = variables_of(done.stdout)
    assert seen["ANTHROPIC_BASE_URL"] == engine.url and seen["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert seen["ANTHROPIC_MODEL"] == seen["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "owner/m 1"
    assert (seen["CLAUDE_CODE_MAX_CONTEXT_TOKENS"], seen["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == ("32768", "8192")
    assert int(seen["API_TIMEOUT_MS"]) == 3600000, "a CPU takes minutes for the first prompt"
    assert "ANTHROPIC_API_KEY" not in seen, "it would win over the token"
    assert not list((folder / "home").iterdir()), "no file of the user's is written"


def test_codex_gets_the_engine_as_a_provider_in_toml(engine: _Engine, folder: Path) -> None:
    done = launched(folder, "codex", "--address", engine.url, "--api-key", KEY, "--", "exec", "Hi")
    assert done.returncode == 7, done.stderr
    *flags, command, text = done.stdout.partition("TMPDIR=")[0].split("\nPATH=")[0].splitlines()[:12]
    assert (command, text) == ("exec", "Hi") and set(flags[::2]) == {"-c"}
    settings: dict[str, object] = {}
    for flag in flags[1::2]:
        name, _, value = flag.partition("=")
        settings[name] = tomllib.loads(f"x = {value}")["x"]
    assert settings == {
        "model_provider": "tokenloom",
        "model_providers.tokenloom": {
            "name": "tokenloom",
            "base_url": f"{engine.url}/v1",
            "wire_api": "responses",
            "stream_idle_timeout_ms": 3600000,
            "env_key": "TOKENLOOM_API_KEY",
        },
        "model": "owner/m 1",
        "model_context_window": 32768,
        "model_auto_compact_token_limit": 26214,
    }
    assert variables_of(done.stdout)["TOKENLOOM_API_KEY"] == KEY


@pytest.mark.parametrize("agent", [CLAUDE, CODEX])
@pytest.mark.parametrize("place", [Place(url="http://h:1", model="a'b \"c", max_model_len=9, api_key=None)])
def test_a_printed_set_up_makes_a_shell_run_the_same(agent: object, place: Place, folder: Path) -> None:
    assert isinstance(agent, type(CLAUDE))
    set_up = agent.set_up(place)
    script = "\n".join(set_up.lines(agent.program, ["exec", "it's"], {}))
    clean = {"PATH": f"{folder}:/usr/bin:/bin", "ANTHROPIC_API_KEY": "x"}
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, env=clean)
    words = [*set_up.arguments, "exec", "it's"]
    assert done.stdout.splitlines()[: len(words)] == words
    assert variables_of(done.stdout).items() >= dict(set_up.variables).items()
    assert not any(name in variables_of(done.stdout) for name in set_up.removed)


def test_a_printed_set_up_names_the_variable_that_holds_the_key(engine: _Engine, folder: Path) -> None:
    for agent in ("claude", "codex"):
        done = launched(folder, agent, "--print", "--address", engine.url, TOKENLOOM_API_KEY=KEY)
        assert done.returncode == 0 and KEY not in done.stdout, done.stderr
        assert shlex.split(done.stdout.splitlines()[-1])[0] == agent
    done = launched(folder, "claude", "--print", "--address", engine.url, "--", "-p", "x", TOKENLOOM_API_KEY=KEY)
    assert 'export ANTHROPIC_AUTH_TOKEN="$TOKENLOOM_API_KEY"' in done.stdout and done.stdout.endswith("claude -p x\n")


def test_each_obstacle_is_one_line_with_what_to_do(engine: _Engine, folder: Path) -> None:
    def refused(*words: str, **variables: str) -> str:
        done = launched(folder, *words, **{"TOKENLOOM_API_KEY": KEY} | variables)
        assert done.returncode in (1, 2) and done.stdout == "" and done.stderr.count("\n") == 1, done
        return done.stderr

    engine.max_model_len = 8192
    short = refused("codex", "--address", engine.url)
    assert "about 9177 tokens" in short and "served with 8192" in short and "--max-model-len 32768" in short
    engine.max_model_len = None
    assert "how long its context is" in refused("codex", "--address", engine.url)
    engine.max_model_len = 32768
    (folder / "codex").unlink()
    assert "npm install -g @openai/codex" in refused("codex", "--address", engine.url)
    assert "status 401: no key" in refused("claude", "--address", engine.url, TOKENLOOM_API_KEY="x")
    assert "engine-launch serve MODEL" in refused("claude")
    assert "does not answer" in refused("claude", "--address", "http://127.0.0.1:1")
    assert "no engine of this user serves at ipc:///x" in refused("claude", "--address", "ipc:///x")
    engine.max_model_len = 16384
    warned = launched(folder, "claude", "--address", engine.url, TOKENLOOM_API_KEY=KEY)
    assert warned.returncode == 7 and "little is left" in warned.stderr.splitlines()[0]
