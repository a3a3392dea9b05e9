"""Ollama's clients, unpatched, against one engine, and the requests that they send, which are the recorded ones.

Calls are made by a schema: the engine's parser takes a JSON object with a name and parameters for a call, and Ollama's
API has no way to force one. Packages are installed at first use (client_environments.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tokenloom.tests.support.recorded_requests import check_recorded
from tokenloom.tests.support.recording_proxy import RecordingProxy
from tokenloom.tests.system.client_environments import CLIENTS, node_folder, python_of
from tokenloom.tests.system.launched import LaunchedEngine, served
from tokenloom.tests.system.test_client_libraries import seen_by

LIMA = "The capital of Peru is Lima."
ADDRESS = {"city": "Lima", "street": {"name": "Union", "number": 7}, "others": [{"name": "Union", "number": 7}]}
NOT_FOUND = [404, True]

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]  # includes the installation

engine = served(
    *("--http", "0", "--chat-template", str(CLIENTS / "tools.jinja"), "--tool-call-parser", "llama"),
    *("--speculation", "off"),
)


@pytest.fixture
def proxy(engine: LaunchedEngine) -> Iterator[RecordingProxy]:
    with RecordingProxy(engine.url) as proxy:
        yield proxy


def version_of(client: str) -> str:
    """Return the pinned version of a client for Python."""
    lines = (CLIENTS / "requirements.txt").read_text(encoding="utf-8").splitlines()
    (version,) = (line.split("==")[1].split()[0] for line in lines if line.startswith(f"{client}=="))
    return version


def test_ollama_for_python(proxy: RecordingProxy) -> None:
    seen = seen_by(proxy.url, python_of("ollama"), str(CLIENTS / "ollama_client.py"))
    assert seen == {
        "talk": [LIMA, "stop", True, True, True],
        "streamed": [LIMA, True, True],
        "awaited": LIMA,
        "generated": [LIMA, LIMA, " Paris.", "length"],
        "structured": True,
        "called": ["find", True, True, [True]],
        "embedded": [2, True, True],
        "listed": ["tokenloom-demo", "tokenloom-demo", True, "success"],
        "refused": [NOT_FOUND, [400, True]],
    }
    check_recorded("ollama_python", version_of("ollama"), proxy.exchanges)


def test_ollama_for_javascript(proxy: RecordingProxy) -> None:
    seen = seen_by(proxy.url, "node", str(node_folder() / "ollama_client.mjs"))
    assert seen == {
        "talk": [LIMA, "stop", True],
        "streamed": LIMA,
        "generated": LIMA,
        "structured": {"city": "Lima"},
        "called": [[["find", {"city": "Lima"}]], True],
        "embedded": 2,
        "aborted": "AbortError",
        "listed": ["tokenloom-demo", "tokenloom-demo", "completion"],
        "refused": ["ResponseError", 404, True],
    }
    version = json.loads((CLIENTS / "package.json").read_text(encoding="utf-8"))["dependencies"]["ollama"]
    check_recorded("ollama_javascript", version, proxy.exchanges)


def test_langchains_chat_ollama(proxy: RecordingProxy) -> None:
    seen = seen_by(proxy.url, python_of("langchain-ollama"), str(CLIENTS / "langchain_ollama_client.py"))
    assert seen == {
        "talk": [True, "stop", True, "AIMessage"],
        "streamed": [LIMA, True],
        "awaited": LIMA,
        "continued": True,
        "structured": True,
        "called": [[[True], [True]], "AIMessage"],
        "embedded": [2, True],
    }
    check_recorded("langchain_ollama", version_of("langchain-ollama"), proxy.exchanges)


def test_llama_indexs_ollama(proxy: RecordingProxy) -> None:
    script = str(CLIENTS / "llama_index_ollama_client.py")
    seen = seen_by(proxy.url, python_of("llama-index-llms-ollama"), script)
    assert seen == {
        "context": 2048,
        "talk": [LIMA, LIMA, True, True],
        "completed": [LIMA, LIMA],
        "structured": True,
        "called": [[[True], [True]], True],
        "embedded": [2, True],
    }
    check_recorded("llama_index_ollama", version_of("llama-index-llms-ollama"), proxy.exchanges)
