"""Unknown fields are accepted: silently in messages, elsewhere with a warning."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tokenloom.tests.system.http_engine import QUESTION

CHAT = {"messages": QUESTION, "max_tokens": 3, "temperature": 0}
SENT_BACK: dict[str, dict[str, Any]] = {  # as other servers' clients have them in an answer
    "litellm": {"provider_specific_fields": None, "thinking_blocks": None, "function_call": None},
    "thinking": {"content": [{"type": "thinking", "thinking": "Peru …"}, {"type": "text", "text": "Lima."}]},
    "anything": {"extra_field": {"a": [1]}, "audio": None, "annotations": [], "refusal": None},
}


@pytest.mark.parametrize("name", SENT_BACK)
def test_an_answers_message_can_be_sent_back(http: httpx2.Client, name: str) -> None:
    history = [*QUESTION, {"role": "assistant", "content": "Lima."} | SENT_BACK[name], *QUESTION]
    plain = [*QUESTION, {"role": "assistant", "content": "Lima."}, *QUESTION]
    answers = [http.post("/v1/chat/completions", json=CHAT | {"messages": each}) for each in (history, plain)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert answers[0].json()["usage"]["prompt_tokens"] == answers[1].json()["usage"]["prompt_tokens"]
    assert "warning" not in answers[0].headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", CHAT | {"stream": True}),
        ("completions", {"prompt": "Hi", "max_tokens": 3}),
        ("responses", {"input": "Hi", "max_output_tokens": 3, "stream": True}),
        ("embeddings", {"input": "Hi"}),
    ],
)
def test_an_unknown_field_gets_a_warning_header(http: httpx2.Client, path: str, body: dict[str, Any]) -> None:
    answer = http.post(f"/v1/{path}", json=body | {"use": 5, 'a"b': 1})
    assert answer.status_code == 200, answer.text
    assert answer.headers["warning"] == r'''299 - "unknown fields were ignored: use (did you mean user?), a\"b"'''
