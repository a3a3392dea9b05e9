"""Hints about the prefix cache, in the fields of OpenAI's and Anthropic's APIs, reach the core; usage names them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.tests.frontend.server.http.served_app import serving
from tokenloom.tests.frontend.server.http.test_adapters import Served
from tokenloom.tests.support.in_loop import in_loop

QUESTION: list[Any] = [{"role": "user", "content": "one two"}]
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SHORT = {"cache_control": {"type": "ephemeral"}}


class Hinted(Served):
    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path)
        self.sent: list[SamplingParams] = []

    def answer_all(self) -> None:
        self.sent += [request.params for request in self.requests]
        super().answer_all()

    async def message(self, **fields: Any) -> Any:
        body = {"model": "sample", "max_tokens": 1, "messages": QUESTION, **fields}
        answer = await self.http.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"], self.sent[-1].prompt_cache_retention


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, "tokenloom.http")


@in_loop(lambda folder: serving(lambda: Hinted(folder)))
async def test_openais_client_sends_keys_and_retentions(served: Hinted) -> None:
    hints: dict[str, Any] = {"prompt_cache_key": "conversation-1", "prompt_cache_retention": "24h"}
    await served.client.chat.completions.create(model="sample", messages=QUESTION, max_tokens=1, **hints)
    await served.client.responses.create(model="sample", input="one two", max_output_tokens=1, store=False, **hints)
    session = {"session_id": "session-1"}
    await served.client.chat.completions.create(model="sample", messages=QUESTION, max_tokens=1, extra_body=session)
    found = [(params.prompt_cache_key, params.prompt_cache_retention) for params in served.sent]
    assert found == [("conversation-1", "24h"), ("conversation-1", "24h"), ("session-1", None)]
    wrong = {"messages": QUESTION, "prompt_cache_retention": "2y"}
    refused = await served.http.post("/v1/chat/completions", json=wrong)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_cache_retention"


@in_loop(lambda folder: serving(lambda: Hinted(folder)))
async def test_cache_control_asks_for_its_longest_time_wherever_it_stands(served: Hinted) -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}}
    text = {"type": "text", "text": "one two"}
    for fields, retention in (
        ({}, None),
        (SHORT, "5m"),
        ({"system": [text | HOUR], "messages": [{"role": "user", "content": [text | SHORT]}]}, "1h"),
        ({"tools": [tool | SHORT]}, "5m"),
        ({"messages": [{"role": "user", "content": [text | HOUR]}]}, "1h"),
    ):
        usage, asked = await served.message(**fields)
        created = usage["cache_creation"]
        assert asked == retention and set(created) == {"ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens"}
        assert sum(created.values()) == usage["cache_creation_input_tokens"]
        assert created["ephemeral_5m_input_tokens" if retention == "1h" else "ephemeral_1h_input_tokens"] == 0
