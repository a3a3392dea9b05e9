"""Unknown fields are accepted: silently in messages, elsewhere with a warning."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest

from tokenloom.tests.system.http_engine import QUESTION

CHAT = {"messages": QUESTION, "max_tokens": 3, "temperature": 0}
SENT_BACK: dict[str, dict[str, Any]] = {  # as other servers' clients have them in an answer
    "litellm": {"provider_specific_fields": None, "thinking_blocks": None, "function_call": None},
    "anthropic": {"content": [{"type": "text", "text": "Lima.", "cache_control": {"type": "ephemeral"}}]},
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


def test_known_fields_of_a_message_are_checked(http: httpx2.Client) -> None:
    message = {"role": "user", "content": 7, "extra": 1}
    error = http.post("/v1/chat/completions", json=CHAT | {"messages": [message]}).json()["error"]
    assert error["param"] == "messages[0].content"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", CHAT),
        ("completions", {"prompt": "Hi", "max_tokens": 3}),
        ("responses", {"input": "Hi", "max_output_tokens": 3}),
        ("embeddings", {"input": "Hi"}),
    ],
)
def test_an_unknown_field_gets_a_warning_header(
    http: httpx2.Client, path: str, body: dict[str, Any], stream: bool
) -> None:
    more = {} if path == "embeddings" else {"stream": stream}
    answer = http.post(f"/v1/{path}", json=body | more | {"use": 5, 'a"b': 1})
    assert answer.status_code == 200, answer.text
    assert answer.headers["warning"] == r'''299 - "unknown fields were ignored: use (did you mean user?), a\"b"'''


def test_tokenize_warns_of_unknown_fields(http: httpx2.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "Hi", "mdoel": "x"})
    assert answer.headers["warning"].endswith('mdoel (did you mean model?)"')


def test_the_official_clients_extra_body_is_accepted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model="tokenloom-demo",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=1,
        extra_body={"early_stopping": True, "separate_reasoning": False},
    )
    assert "early_stopping" in answer.headers["warning"] and answer.parse().choices
