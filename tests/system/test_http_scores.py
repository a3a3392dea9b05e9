"""Prompts are scored without or beside an answer, and the fields that vLLM always writes are present."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest

from tokenloom.tests.system.http_engine import QUESTION, ask

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
FRANCE = {"prompt": "The capital of France is", "temperature": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_zero_max_tokens_scores_the_prompt(client: openai.OpenAI, stream: bool) -> None:
    def scores(max_tokens: int) -> tuple[str, list[Any], list[Any], Any]:
        made: Any = client.completions.create(
            model="tokenloom-demo",
            prompt=FRANCE["prompt"],
            echo=True,
            logprobs=2,
            max_tokens=max_tokens,
            stream=stream,
            temperature=0,
        )
        choices = [chunk.choices[0] for chunk in made] if stream else [made.choices[0]]
        tokens = [token for each in choices for token in each.logprobs.tokens]
        values = [value for each in choices for value in each.logprobs.token_logprobs]
        return "".join(each.text for each in choices), tokens, values, choices[-1].finish_reason

    text, tokens, values, reason = scores(0)
    longer = scores(1)
    assert (text, reason) == (FRANCE["prompt"], "length")
    assert tokens == longer[1][:-1] and len(tokens) == 7
    assert values[0] is None and values[1:] == pytest.approx(longer[2][1:-1], abs=1e-4)


@pytest.mark.parametrize("n", [1, 2])
def test_prompt_logprobs_are_keyed_by_token_id(http: httpx2.Client, n: int) -> None:
    body = FRANCE | {
        "max_tokens": 1,
        "return_token_ids": True,
        "echo": True,
        "logprobs": 1,
        "prompt_logprobs": 3,
        "n": n,
    }
    for choice in ask(http, COMPLETION, body)["choices"]:
        first, *others = choice["prompt_logprobs"]
        ids, columns = choice["prompt_token_ids"], choice["logprobs"]
        assert first is None and len(others) == len(ids) - 1
        for place, (token_id, by_id) in enumerate(zip(ids[1:], others, strict=True), 1):
            own = by_id[str(token_id)]
            assert own["decoded_token"] == columns["tokens"][place]
            assert own["logprob"] == pytest.approx(columns["token_logprobs"][place])
            assert {each["rank"] for each in by_id.values()} == {1, 2, 3, own["rank"]}
            assert len(columns["top_logprobs"][place]) <= 2
            assert next(iter(columns["top_logprobs"][place])) == columns["tokens"][place]


def test_a_chat_returns_prompt_logprobs_at_the_top_level(http: httpx2.Client) -> None:
    body = {"messages": QUESTION, "max_tokens": 1, "temperature": 0}
    answer = ask(http, CHAT, body | {"prompt_logprobs": 0, "return_token_ids": True})
    ids = ask(http, "/tokenize", {"messages": QUESTION})["tokens"]
    assert answer["prompt_token_ids"] == ids
    assert [list(by_id) for by_id in answer["prompt_logprobs"][1:]] == [[str(token_id)] for token_id in ids[1:]]
    assert len(answer["choices"][0]["token_ids"]) == 1


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_fields_that_vllm_always_writes_are_present(http: httpx2.Client, path: str) -> None:
    body = FRANCE if path == COMPLETION else {"messages": QUESTION}
    answer = ask(http, path, body | {"max_tokens": 1})
    for name in ("service_tier", "system_fingerprint", "kv_transfer_params"):
        assert answer[name] is None
    (choice,) = answer["choices"]
    assert choice["token_ids"] is choice["stop_reason"] is choice["logprobs"] is None
    holder = choice if path == COMPLETION else answer
    assert holder["prompt_logprobs"] is holder["prompt_token_ids"] is None
    if path == CHAT:
        names = ("refusal", "annotations", "audio", "function_call", "reasoning")
        assert [choice["message"].get(name, name) for name in names] == [None] * 5
