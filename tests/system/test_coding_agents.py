"""Claude Code and Codex, unpatched, with a real model: as `engine-launch launch` sets them up, and with their defaults.

The model is too small to work as an agent. So each first answer is forced to be one harmless call, which the agent
carries out, and the second to be a word. No request is refused, and each stream is read to its end.
The requests are the recorded ones. The programs are installed at first use (client_environments.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenloom.frontend.cli.agents.agent import Agent
from tokenloom.frontend.cli.agents.claude import CLAUDE
from tokenloom.frontend.cli.agents.codex import CODEX
from tokenloom.tests.support.recorded_requests import check_recorded
from tokenloom.tests.support.recording_proxy import Exchange, RecordingProxy
from tokenloom.tests.system.client_environments import agent_folder
from tokenloom.tests.system.launched import LaunchedEngine, served
from tokenloom.tests.system.real_model import model_file, needs_real_model

DEADLINE_S = 1500.0  # a CPU computes the prompt of an agent for minutes
LONG = 32768
MODEL = "smollm2"
WORD = "Done."
SUM = "loom-42"  # of the call, which computes its end

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600), needs_real_model]

engine = served(
    *("--http", "0", "--model", str(model_file()), "--served-model-name", MODEL, "*"),
    *("--hf-overrides.max_position_embeddings", str(LONG), "--max-model-len", str(LONG)),
)


@pytest.fixture
def proxy(engine: LaunchedEngine) -> Iterator[RecordingProxy]:
    with RecordingProxy(engine.url, scripted) as proxy:
        yield proxy


def scripted(path: str, body: Any) -> Any:
    """Force a call of the first known tool, if the conversation has no result of one yet; else the last word."""
    for space, tool in _tools(body):
        if tool.get("name") in CALLS and not _has_result(body):
            return CALLS[tool["name"]](body, tool, space)
    if path.startswith("/v1/messages"):
        return body | {"output_config": {"format": {"type": "json_schema", "schema": {"const": WORD}}}}
    return body | {"guided_choice": [WORD]}


def _has_result(body: Any) -> bool:
    """Return whether the conversation has the result of a call."""
    if "messages" in body:
        blocks = [each for turn in body["messages"] if isinstance(turn["content"], list) for each in turn["content"]]
        return any(each["type"] == "tool_result" for each in blocks)
    return any(each.get("type", "").endswith("_call_output") for each in body["input"])


def _tools(body: Any) -> Iterator[tuple[str | None, Any]]:
    """Yield (namespace, tool) for each tool of a body, those in its input too."""
    items = body["input"] if isinstance(body.get("input"), list) else []
    for tool in [*body.get("tools", ()), *(tool for item in items for tool in item.get("tools", ()))]:
        if tool.get("type") != "namespace":
            yield None, tool
        for inner in tool.get("tools", ()):
            yield tool["name"], inner


def _script(body: Any, tool: Any, space: str | None) -> Any:
    """Force a call of Codex's tool that takes a program in JavaScript."""
    text = r'text\("loom-" \+ \(40 \+ 2\)\)'
    tool["format"] = {"type": "grammar", "syntax": "regex", "definition": text}
    return body | {"tool_choice": {"type": "custom", "name": tool["name"], "namespace": space}}


def _command(body: Any, tool: Any, _: str | None) -> Any:
    """Force a call of Codex's tool that takes a command."""
    tool["parameters"] = _exactly(cmd="echo loom-$((40+2))")
    return body | {"tool_choice": {"type": "function", "name": tool["name"]}, "parallel_tool_calls": False}


def _bash(body: Any, tool: Any, _: str | None) -> Any:
    """Force a call of Claude Code's tool that takes a command."""
    tool["input_schema"] = _exactly(command="echo loom-$((40+2))", description="adds")
    return body | {"tool_choice": {"type": "tool", "name": tool["name"], "disable_parallel_tool_use": True}}


def _exactly(**values: str) -> Any:
    properties = {name: {"const": value} for name, value in values.items()}
    return {"type": "object", "properties": properties, "required": list(values), "additionalProperties": False}


CALLS = {"exec": _script, "exec_command": _command, "Bash": _bash}


def run(agent: Agent, folder: Path, command: list[str], **variables: str) -> str:
    """Run a command in an empty home and return its output. The agent's program is on the path."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    programs = agent_folder(agent.package, agent.measured)
    environment = {"PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "TERM": "xterm"} | variables
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=work,
        env=environment,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def launch(agent: Agent, folder: Path, proxy: RecordingProxy, *rest: str) -> str:
    program = [sys.executable, "-P", "-m", "tokenloom.frontend.launch", "launch", agent.program]
    return run(agent, folder, [*program, "--address", proxy.url, "--", *rest])


def check_round_trip(exchanges: list[Exchange], path: str) -> None:
    """Check that a call was carried out, that no request was refused, and that each stream was read to its end."""
    asked = [each for each in exchanges if each.path.partition("?")[0] == path]
    assert len(asked) >= 2 and [(each.status, each.is_whole) for each in asked] == [(200, True)] * len(asked)
    assert SUM not in json.dumps(asked[0].body) and SUM in json.dumps(asked[-1].body), "the result came back"


def num_prompt_tokens(exchange: Exchange) -> int:
    """Return the prompt tokens that an answer counts: less than the agent sent, by the schema of the forced call."""
    lines = [line[6:] for line in exchange.answer.decode().splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    if exchange.path.startswith("/v1/messages"):
        return int(events[0]["message"]["usage"]["input_tokens"])
    return int(events[-1]["response"]["usage"]["input_tokens"])


def test_codex_as_it_is_launched(proxy: RecordingProxy, tmp_path: Path) -> None:
    shown = launch(CODEX, tmp_path, proxy, "exec", "--skip-git-repo-check", "Say hello.")
    assert WORD in shown
    asked = [each for each in proxy.exchanges if each.method == "POST"]
    check_round_trip(asked, "/v1/responses")
    assert num_prompt_tokens(asked[0]) == pytest.approx(CODEX.num_tokens, rel=0.1)
    check_recorded("codex", CODEX.measured, asked)


def test_codex_with_its_default_model(proxy: RecordingProxy, tmp_path: Path) -> None:
    provider = f'{{name = "own", base_url = "{proxy.url}/v1", wire_api = "responses"}}'
    settings = ["-c", 'model_provider="own"', "-c", f"model_providers.own={provider}"]
    command = [str(agent_folder(CODEX.package, CODEX.measured) / "codex"), *settings]
    shown = run(CODEX, tmp_path, [*command, "exec", "--skip-git-repo-check", "Say hello."])
    assert WORD in shown
    check_round_trip(proxy.exchanges, "/v1/responses")
    assert all("additional_tools" in json.dumps(each.body) for each in proxy.exchanges)
    check_recorded("codex_default", CODEX.measured, proxy.exchanges)


def test_claude_code_as_it_is_launched(proxy: RecordingProxy, tmp_path: Path) -> None:
    shown = launch(CLAUDE, tmp_path, proxy, "-p", "Say hello.")
    assert WORD in shown
    asked = [each for each in proxy.exchanges if each.method == "POST"]
    check_round_trip(asked, "/v1/messages")
    assert num_prompt_tokens(asked[0]) == pytest.approx(CLAUDE.num_tokens, rel=0.1)
    check_recorded("claude_code", CLAUDE.measured, asked)


def test_claude_code_with_its_default_model(proxy: RecordingProxy, tmp_path: Path) -> None:
    variables = {"ANTHROPIC_BASE_URL": proxy.url, "ANTHROPIC_AUTH_TOKEN": "none"}
    program = str(agent_folder(CLAUDE.package, CLAUDE.measured) / "claude")
    shown = run(CLAUDE, tmp_path, [program, "-p", "Say hello."], **variables)
    assert WORD in shown
    asked = [each for each in proxy.exchanges if each.method == "POST"]
    check_round_trip(asked, "/v1/messages")
    check_recorded("claude_code_default", CLAUDE.measured, asked)
