"""Third-party clients in tool loops of two turns, unpatched, with a model of each form of calls.

The model writes two calls, the client runs its function for both and sends the results back, and the model answers.
tests/clients/tool_loops has a script for each client. The tool is strict or not. The requests are the recorded ones
(test_recorded_clients.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tokenloom.tests.support.recorded_requests import check_recorded
from tokenloom.tests.support.recording_proxy import RecordingProxy
from tokenloom.tests.system.client_environments import CLIENTS, python_of, version_of
from tokenloom.tests.system.scripted_engine import ScriptedEngine
from tokenloom.tests.system.test_client_libraries import seen_by
from tokenloom.tests.system.tool_forms import ANSWER, CALLS, FORMS, ToolForm

LOOPS = {  # script: client, and the loops that it plays
    "openai_loop": ("openai", ["chat", "chat_stream", "responses", "responses_stream"]),
    "anthropic_loop": ("anthropic", ["messages", "messages_stream"]),
    "langchain_loop": ("langchain-openai", ["chat", "chat_stream", "responses", "responses_stream"]),
    "pydantic_ai_loop": ("pydantic-ai-slim", ["chat", "chat_stream", "responses", "responses_stream"]),
    "agents_loop": ("openai-agents", ["chat", "chat_stream", "responses", "responses_stream"]),
}
MODES = ["auto", "strict"]
ENDS = ("tool_calls", "completed", "tool_use")  # of the first turn, in chats, responses and messages
RECORDED = "thoughts"  # the form whose requests are recorded: those of the others have no more fields

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]  # includes the installation


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(form: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    with FORMS[form].start(tmp_path_factory.mktemp("run")) as engine:
        engine.wait_ready()
        yield engine
        engine.end()


@pytest.mark.parametrize("script", LOOPS)
def test_a_client_runs_both_calls_and_gets_the_answer(engine: ScriptedEngine, form: str, script: str) -> None:
    client, loops = LOOPS[script]
    python = python_of(client)
    with RecordingProxy(engine.url) as proxy:
        seen: Any = seen_by(proxy.url, python, str(CLIENTS / "tool_loops" / f"{script}.py"))
        assert [*seen] == MODES
        for mode, name in itertools.product(MODES, loops):
            check(f"{mode}, {name}", seen[mode][name], FORMS[form])
        if form == RECORDED:
            check_recorded(script, version_of(client), proxy.exchanges)


def check(where: str, loop: Any, form: ToolForm) -> None:
    """Check the results of both turns, and the calls that it ran."""
    assert isinstance(loop, dict), f"{where}: {loop}"
    assert sorted(loop["ran"], key=str) == sorted(CALLS, key=str), f"{where}: {loop}"  # some run them at once
    seen = loop["seen"]
    wanted = {"thought": form.thought, "said": form.said, "answer": ANSWER}
    assert {name: seen[name] for name in wanted if name in seen} == {
        name: value for name, value in wanted.items() if name in seen
    }, f"{where}: {loop}"
    assert seen.get("end") in (None, *ENDS), f"{where}: {loop}"
    is_written = form.ids and not seen["ids"][0].startswith("toolu_")  # Anthropic's ids have other letters
    assert seen["ids"] == form.ids if is_written else len(set(seen["ids"])) == len(CALLS), f"{where}: {loop}"
