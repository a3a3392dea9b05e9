"""Third-party client libraries, unpatched and at their latest versions, against one engine.

Each script of tests/clients requests answers with only one possible result, so that the demo model gives them, and
prints the library's result: forced tools, nested structures, streams, second turns that send back the first answer.
Packages are installed at first use (client_environments.py).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tokenloom.tests.system.client_environments import CLIENTS, node_folder, python_of
from tokenloom.tests.system.launched import LaunchedEngine, served

DEADLINE_S = 200.0
KEY = "sk-loom"
LIMA = "The capital of Peru is Lima."

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]  # includes the installation


OPTIONS = ("--http", "0", "--chat-template", str(CLIENTS / "tools.jinja"))
engine, keyed = served(*OPTIONS), served(*OPTIONS, "--api-key", KEY)


def seen_by(url: str, *command: str) -> dict[str, object]:
    """Run a script with the URL as its last argument and return the JSON object that it prints last."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environment.pop("PYTHONPATH", None)
    program, script, *more = command
    done = subprocess.run(
        [program, script, url, *more],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=Path(script).parent,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_openai_for_python(url: str) -> None:
    seen = seen_by(url, python_of("openai"), str(CLIENTS / "openai_client.py"))
    assert seen == {
        "required": [[True], "tool_calls", None, "length"],
        "streamed": [[True], True, "length"],
        "parsed": [True, "length"],
        "parsed_stream": True,
        "response_stream": [[True], True],
        "response_parsed": True,
        "response_stored": [True, ["function_call", "function_call_output"], True, "previous_response_not_found"],
    }


def test_coheres_client(url: str) -> None:
    seen = seen_by(url, python_of("cohere"), str(CLIENTS / "cohere_client.py"))
    assert seen == {
        "types": {"float": 256, "int8": 256, "uint8": 256, "binary": 32, "ubinary": 32, "base64": 1368},
        "meta": ["2", 4, ["Lima"]],
        "cut": [2048, 8],
        "refused": "input_type",
        "first": ["embeddings_floats", 200, True],
    }


def test_anthropic_for_python(keyed: LaunchedEngine) -> None:
    seen = seen_by(keyed.url, python_of("anthropic"), str(CLIENTS / "anthropic_client.py"), KEY)
    block = ["content_block_start", "content_block_delta", "text", "content_block_stop"]
    assert seen == {
        "streamed": [True, ["message_start", *block, "message_delta", "message_stop"]],
        "required": [[True], "tool_use", True, True, "max_tokens"],
        "structured": [True, True, True],
        "cut": ["max_tokens", True, "end_turn"],
        "counted": True,
        "refused": {
            "too_long": ["BadRequestError", "invalid_request_error", True],
            "wrong_key": ["AuthenticationError", "authentication_error", True],
            "no_model": ["NotFoundError", "not_found_error", True],
        },
    }


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
def test_litellm(url: str, provider: str) -> None:
    seen = seen_by(url, python_of("litellm"), str(CLIENTS / "litellm_client.py"), provider)
    assert seen == {
        "required": [[True], "tool_calls", "length"],
        "streamed": [[True], "length"],
        "structured": True,
        "too_long": ["ContextWindowExceededError"] * 2,
    }


def test_langchains_chat_model(url: str) -> None:
    seen = seen_by(url, python_of("langchain-openai"), str(CLIENTS / "langchain_client.py"))
    assert seen == {
        "talk": [True, "stop", True, ["AIMessage", "AIMessage"]],
        "structured": [True, True],
        "called": [[[True], "AIMessage"]] * 2,
        "called_in_a_stream": [[True], [True]],
        "too_long": ["OpenAIContextOverflowError"] * 2,
    }


@pytest.mark.parametrize("model", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(url: str, model: str) -> None:
    seen = seen_by(url, python_of("openai-agents"), str(CLIENTS / "agents_client.py"), model)
    assert seen == {
        "talk": [True, True],
        "typed": [True, True],
        "called": ["found", True],
        "goes_on_by_id": True if model == "OpenAIResponsesModel" else "no id",
    }


def test_openai_for_javascript(url: str) -> None:
    seen = seen_by(url, "node", str(node_folder() / "openai_client.mjs"))
    assert seen == {
        "model": "tokenloom-demo",
        "chat": LIMA,
        "streamed": LIMA,
        "completion_tokens": 8,
        "parsed": {"city": "Lima"},
        "call": ["find", {"city": "Lima"}],
        "response_streamed": LIMA,
    }


@pytest.mark.parametrize("provider", ["compatible", "chat", "responses"])
def test_vercels_ai_sdk(url: str, provider: str) -> None:
    seen = seen_by(url, "node", str(node_folder() / "ai_sdk_client.mjs"), provider)
    assert seen == {
        "talk": [True, True, True],
        "structured": True,
        "called": [True, "found", True],
        "called_in_a_stream": [True, True, True],
    }
