"""Third-party client libraries, unpatched and at their latest versions, against one engine.

Each script of tests/clients requests answers with only one possible result, so that the demo model gives them, and
prints the library's result: tools forced and free, nested structures, streams, second turns that send back the first
answer, cut answers, too long prompts. Packages are installed at first use (client_environments.py).
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
        "named": [True],
        "allowed": [True],
        "streamed": [[True], True, "length"],
        "free": "length",
        "tools_but_none": [True, None],
        "parsed": [True, "length"],
        "parsed_stream": True,
        "cut": ["length", True, True],
        "cut_named": ["length", True, True],
        "cut_stream": ["length", True],
        "cut_after_a_call": [True, True],
        "too_long": ["context_length_exceeded"] * 3,
        "response_call": [[True], True, True],
        "response_stream": [[True], True],
        "response_parsed": True,
        "response_cut": ["incomplete", "max_output_tokens"],
        "response_stored": [True, ["function_call", "function_call_output"], True, "previous_response_not_found"],
        "response_in_the_background": [True, "response.incomplete", "queued", "cancelled"],
    }


def test_coheres_client(url: str) -> None:
    seen = seen_by(url, python_of("cohere"), str(CLIENTS / "cohere_client.py"))
    assert seen == {
        "types": {"float": 256, "int8": 256, "uint8": 256, "binary": 32, "ubinary": 32, "base64": 1368},
        "meta": ["2", 4, ["Lima"]],
        "cut": [2048, 8],
        "refused": "input_type",
        "first": ["embeddings_floats", 200, True],
        "reranked": [[7, 2, True]] * 2,
    }


def test_anthropic_for_python(keyed: LaunchedEngine) -> None:
    seen = seen_by(keyed.url, python_of("anthropic"), str(CLIENTS / "anthropic_client.py"), KEY)
    block = ["content_block_start", "content_block_delta", "text", "content_block_stop"]
    bad = ["BadRequestError", "invalid_request_error", True]
    assert seen == {
        "plain": ["message", "assistant", "end_turn", True, True],
        "streamed": [True, ["message_start", *block, "message_delta", "message_stop"]],
        "required": [[True], "tool_use", True, True, "max_tokens"],
        "named": [[True], "tool_use", "max_tokens"],
        "free": ["max_tokens", "max_tokens"],
        "tools_but_none": [True, []],
        "failed_result": "max_tokens",
        "structured": [True, True, True],
        "stopped": ["The capital of ", "stop_sequence", "Peru"],
        "prefilled": " Lima.",
        "thinking": "end_turn",
        "cut": ["max_tokens", True, "max_tokens"],
        "left": ["message_start", "end_turn"],
        "counted": True,
        "beta": "end_turn",
        "models": ["tokenloom-demo"],
        "refused": {
            "too_long": bad,
            "too_long_stream": bad,
            "wrong_key": ["AuthenticationError", "authentication_error", True],
            "no_model": ["NotFoundError", "not_found_error", True],
            "picture": bad,
            "server_tool": bad,
        },
    }


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
def test_litellm(url: str, provider: str) -> None:
    seen = seen_by(url, python_of("litellm"), str(CLIENTS / "litellm_client.py"), provider)
    assert seen == {
        "plain": "length",
        "required": [[True], "tool_calls", "length"],
        "streamed": [[True], "length"],
        "structured": True,
        "cut": ["length", "length"],
        "too_long": ["ContextWindowExceededError"] * 2,
    }


def test_langchains_chat_model(url: str) -> None:
    seen = seen_by(url, python_of("langchain-openai"), str(CLIENTS / "langchain_client.py"))
    assert seen == {
        "talk": [True, "stop", True, ["AIMessage", "AIMessage"]],
        "streamed": [True, True],
        "batch": 2,
        "chain": True,
        "awaited": True,
        "structured": [True, True],
        "called": [[[True], "AIMessage"]] * 2,
        "called_in_a_stream": [[True], [True]],
        "cut": ["AIMessage", "AIMessage"],
        "too_long": ["OpenAIContextOverflowError"] * 2,
    }


@pytest.mark.parametrize("model", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(url: str, model: str) -> None:
    seen = seen_by(url, python_of("pydantic-ai-slim"), str(CLIENTS / "pydantic_ai_client.py"), model)
    assert seen == {
        "talk": [True, True],
        "called": [True, True],
        "structured": [True, True],
        "streamed": [True, True],
        "cut": "UnexpectedModelBehavior",
        "too_long": "ModelContextWindowExceededError",
    }


def test_instructor(url: str) -> None:
    seen = seen_by(url, python_of("instructor"), str(CLIENTS / "instructor_client.py"))
    assert seen == {
        "modes": [True, True, True],
        "partial": [True, True, True],
        "responses": True,
        "second_turn": [True, True],
        "cut": ["IncompleteOutputException"] * 3,
        "too_long": "InstructorRetryException",
    }


def test_llama_indexs_openai_like(url: str) -> None:
    seen = seen_by(url, python_of("llama-index-llms-openai-like"), str(CLIENTS / "llama_index_client.py"))
    assert seen == {
        "talk": [True, True],
        "structured": [True, True],
        "called": [[True], "ChatResponse"],
        "called_in_a_stream": [True],
        "cut": ["length", True],
        "too_long": "BadRequestError",
    }


@pytest.mark.parametrize("model", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(url: str, model: str) -> None:
    seen = seen_by(url, python_of("openai-agents"), str(CLIENTS / "agents_client.py"), model)
    assert seen == {
        "talk": [True, True],
        "typed": [True, True],
        "called": ["found", True],
        "goes_on_after_a_call": True,
        "goes_on_by_id": True if model == "OpenAIResponsesModel" else "no id",
        "cut": "incomplete" if model == "OpenAIResponsesModel" else True,
        "too_long": "BadRequestError",
    }


def test_openai_for_javascript(url: str) -> None:
    seen = seen_by(url, "node", str(node_folder() / "openai_client.mjs"))
    assert seen == {
        "model": "tokenloom-demo",
        "completion": " Lima.",
        "chat": LIMA,
        "streamed": LIMA,
        "completion_tokens": 8,
        "helper": LIMA,
        "parsed": {"city": "Lima"},
        "call": ["find", {"city": "Lima"}],
        "response": LIMA,
        "response_streamed": LIMA,
        "errors": [["NotFoundError", "model"], ["BadRequestError", "temperature"]],
    }


@pytest.mark.parametrize("provider", ["compatible", "chat", "responses"])
def test_vercels_ai_sdk(url: str, provider: str) -> None:
    seen = seen_by(url, "node", str(node_folder() / "ai_sdk_client.mjs"), provider)
    assert seen == {
        "talk": [True, True, True],
        "streamed": [True, True],
        "structured": True,
        "structured_stream": True,
        "called": [True, "found", True],
        "called_in_a_stream": [True, True, True],
        "cut": [True, True],
        "cut_stream": ["Lima", True],
        "too_long": ["AI_APICallError", 400, "context_length_exceeded"],
    }
