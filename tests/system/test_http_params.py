"""Sampling parameters beyond OpenAI's over HTTP, on an engine that allows them; some templates open reasoning."""

from __future__ import annotations

import json
from collections.abc import Sequence

import httpx2
import pytest
from torch import Tensor

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.tests.system import test_http_fields as http_fields
from tokenloom.tests.system.equipped_engine import PROCESSOR
from tokenloom.tests.system.http_engine import ask
from tokenloom.tests.system.test_http_fields import CHAT, COMPLETION, Answer, text_of, tokens_of

THINKING = (DEMO_FOLDER / "chat_template.jinja").read_text(encoding="utf-8") + "<think>"
AS_TEXT = {"return_tokens_as_token_ids": False}
FRANCE, QUESTION = http_fields.FRANCE | AS_TEXT, http_fields.QUESTION | AS_TEXT | {"chat_template": THINKING}


def only(prompt_ids: Sequence[int], output_ids: Sequence[int], logits: Tensor, extra_args: dict[str, int]) -> Tensor:
    """Allow only one token, as a logits processor."""
    chosen = logits[extra_args["only"]].clone()
    logits.fill_(-float("inf"))
    logits[extra_args["only"]] = chosen
    return logits


@pytest.fixture
def http(door: httpx2.Client) -> httpx2.Client:
    return door


def chat_events(http: httpx2.Client, body: Answer) -> list[Answer]:
    with http.stream("POST", CHAT, json=body | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


@pytest.mark.parametrize("named_by_draw", [False, True])
def test_requested_logprob_tokens_are_returned_beside_the_sampled_token(
    http: httpx2.Client, named_by_draw: bool
) -> None:
    paris, rome = tokens_of(http, " Paris")[0], tokens_of(http, " Rome")[0]
    named = [rome, 7, rome, paris] if named_by_draw else [rome, 7]
    every, columns = (
        ask(http, COMPLETION, FRANCE | {"max_tokens": 1} | more)["choices"][0]["logprobs"]
        for more in ({"logprobs": -1}, {"logprobs": 1, "logprob_token_ids": named})
    )
    assert columns["tokens"] == [" Paris"] and columns["token_logprobs"] == every["token_logprobs"]
    texts = {" Paris", *(ask(http, "/detokenize", {"tokens": [each]})["prompt"] for each in named)}
    assert columns["top_logprobs"] == [{text: every["top_logprobs"][0][text] for text in texts}]
    body = QUESTION | {"logprobs": True, "top_logprobs": 3, "logprob_token_ids": named, "max_tokens": 2}
    salts = [{"cache_salt": f"{name} {named_by_draw}"} for name in ("whole", "streamed")]  # neither finds a prefix
    whole = ask(http, CHAT, body | salts[0])["choices"][0]["logprobs"]["content"]
    events = chat_events(http, body | salts[1])
    streamed = [each for event in events for each in (event["logprobs"] or {"content": []})["content"]]
    assert whole == streamed and len(whole) == 2
    for each in whole:
        found = sorted(top["token"] for top in each["top_logprobs"])
        assert found == sorted((texts if named_by_draw else texts - {" Paris"}) | {each["token"]})


@pytest.mark.parametrize("budget", [6, 0])
def test_structured_output_begins_after_reasoning_opened_by_the_template(http: httpx2.Client, budget: int) -> None:
    schema = {"type": "object", "properties": {"a": {"const": "<think>x"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = QUESTION | {"response_format": form, "thinking_token_budget": budget, "return_token_ids": True}
    body |= {"max_tokens": 120, "skip_special_tokens": False, "ignore_eos": True}
    choice = ask(http, CHAT, body)["choices"][0]
    end = tokens_of(http, "</think>")
    assert choice["token_ids"][budget : budget + len(end)] == end
    assert json.loads(choice["message"]["content"]) == {"a": "<think>x"}
    events = chat_events(http, body)
    assert "".join(event["delta"].get("content") or "" for event in events) == choice["message"]["content"]
    thought = "".join(event["delta"].get("reasoning_content") or "" for event in events)
    assert thought == (choice["message"].get("reasoning_content") or "")


def test_an_allowed_logits_processor_gets_the_requests_arguments(http: httpx2.Client) -> None:
    body = FRANCE | {"logits_processors": [PROCESSOR], "vllm_xargs": {"only": tokens_of(http, " Rome")[0]}}
    assert text_of(ask(http, COMPLETION, body | {"max_tokens": 2, "temperature": 1})) == " Rome Rome"
    answer = http.post(COMPLETION, json=body | {"logits_processors": ["os:abort"]})
    assert answer.status_code == 400 and "--allowed-logits-processors" in answer.json()["error"]["message"]
