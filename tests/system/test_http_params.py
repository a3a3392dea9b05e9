"""Sampling parameters beyond OpenAI's over HTTP, on an engine that allows them; some templates open reasoning."""

from __future__ import annotations

import json
from collections.abc import Sequence

import httpx2
import pytest
from torch import Tensor

from tokenloom.frontend.supervisor.resolve import DEMO_FOLDER
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
    every = ask(http, COMPLETION, FRANCE | {"max_tokens": 1, "logprobs": -1})["choices"][0]["logprobs"]
    columns = ask(http, COMPLETION, FRANCE | {"max_tokens": 1, "logprobs": 1, "logprob_token_ids": named})
    columns = columns["choices"][0]["logprobs"]
    assert columns["tokens"] == [" Paris"] and columns["token_logprobs"] == every["token_logprobs"]
    texts = {" Paris", *(http.post("/detokenize", json={"tokens": [each]}).json()["prompt"] for each in named)}
    assert columns["top_logprobs"] == [{text: every["top_logprobs"][0][text] for text in texts}]
    body = QUESTION | {"logprobs": True, "top_logprobs": 3, "logprob_token_ids": named, "max_tokens": 2}
    whole = ask(http, CHAT, body)["choices"][0]["logprobs"]["content"]
    streamed = [each for event in chat_events(http, body) for each in (event["logprobs"] or {"content": []})["content"]]
    assert whole == streamed and len(whole) == 2
    for each in whole:
        found = [top["token"] for top in each["top_logprobs"]]
        assert len(found) == len(set(found)) and set(found) == texts - {" Paris"} | {each["token"]} | (
            {" Paris"} if named_by_draw else set()
        )


def test_logprob_token_ids_need_logprobs_and_ids_in_the_vocabulary(http: httpx2.Client) -> None:
    for path, body in ((CHAT, QUESTION), (COMPLETION, FRANCE)):
        answer = http.post(path, json=body | {"logprob_token_ids": [5]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "logprob_token_ids"
        answer = http.post(path, json=body | {"logprob_token_ids": [99999], "logprobs": path == CHAT or 1})
        assert answer.status_code == 400 and "ids are 0 to 2047" in answer.json()["error"]["message"]


def test_logprobs_of_all_tokens_are_returned_if_allowed(http: httpx2.Client) -> None:
    answer = ask(http, CHAT, QUESTION | {"logprobs": True, "top_logprobs": -1, "max_tokens": 1})
    assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2048


@pytest.mark.parametrize("budget", [0, 6])
def test_reasoning_ends_when_its_token_budget_is_spent(http: httpx2.Client, budget: int) -> None:
    body = QUESTION | {
        "thinking_token_budget": budget,
        "max_tokens": 30,
        "return_token_ids": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    choice = ask(http, CHAT, body)["choices"][0]
    end = tokens_of(http, "</think>")
    assert choice["token_ids"][budget : budget + len(end)] == end
    thought = http.post("/detokenize", json={"tokens": choice["token_ids"][:budget]}).json()["prompt"] if budget else ""
    assert (choice["message"].get("reasoning_content") or "") == thought
    assert choice["message"]["content"] and "think" not in choice["message"]["content"]
    events = chat_events(http, body)
    assert "".join(event["delta"].get("reasoning_content") or "" for event in events) == thought
    assert "".join(event["delta"].get("content") or "" for event in events) == choice["message"]["content"]
    free = ask(http, CHAT, body | {"thinking_token_budget": -1})["choices"][0]
    assert free["token_ids"][budget : budget + len(end)] != end


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


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=["any", "named"])
def test_a_forced_call_begins_after_reasoning_opened_by_the_template(http: httpx2.Client, choice: object) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}}
    body = QUESTION | {"tools": [{"type": "function", "function": function}], "tool_choice": choice, "max_tokens": 120}
    body |= {"parallel_tool_calls": False, "thinking_token_budget": 6, "ignore_eos": True}
    message = ask(http, CHAT, body)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1} and message["reasoning"] and not message["content"]
    events = chat_events(http, body)
    assert "".join(event["delta"].get("reasoning") or "" for event in events) == message["reasoning"]
    calls = [call for event in events for call in event["delta"].get("tool_calls") or ()]
    assert json.loads("".join(each["function"]["arguments"] for each in calls)) == {"a": 1}
    cut = ask(http, CHAT, body | {"max_tokens": 5})["choices"][0]
    assert cut["message"]["reasoning"] and not cut["message"].get("tool_calls") and cut["finish_reason"] == "length"


def test_a_thinking_budget_does_not_break_a_schema(http: httpx2.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"const": "<think>" * 9}}, "required": ["a"]}
    answer = ask(http, COMPLETION, FRANCE | {"guided_json": schema, "thinking_token_budget": 3, "max_tokens": 200})
    assert json.loads(text_of(answer)) == {"a": "<think>" * 9}


def test_an_allowed_logits_processor_gets_the_requests_arguments(http: httpx2.Client) -> None:
    body = FRANCE | {"logits_processors": [PROCESSOR], "vllm_xargs": {"only": tokens_of(http, " Rome")[0]}}
    assert text_of(ask(http, COMPLETION, body | {"max_tokens": 2, "temperature": 1})) == " Rome Rome"
    answer = http.post(COMPLETION, json=body | {"logits_processors": ["os:abort"]})
    assert answer.status_code == 400 and "--allowed-logits-processors" in answer.json()["error"]["message"]


def test_repetition_detection_ends_a_repetitive_answer(http: httpx2.Client) -> None:
    body = FRANCE | {"allowed_token_ids": [300], "max_tokens": 20, "return_token_ids": True}
    body["repetition_detection"] = {"max_pattern_size": 2, "min_count": 5}
    (choice,) = ask(http, COMPLETION, body)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    assert choice["token_ids"] == [300] * 5
    answer = http.post(COMPLETION, json=body | {"repetition_detection": {"max_pattern_size": 2}})
    assert answer.status_code == 400 and "repetition_detection.min_count" in answer.json()["error"]["message"]


@pytest.mark.parametrize("num_words", [4, 3000, 20_000])  # fits, too long, for the intake process
def test_truncation_side_selects_the_removed_end_of_the_prompt(http: httpx2.Client, num_words: int) -> None:
    text = " ".join(["one", *["two"] * num_words, "three"])
    chat = {"messages": [{"role": "user", "content": text}]}
    begins = {
        "prompt": (text, ask(http, "/tokenize", {"prompt": "one two two two"})["tokens"]),
        "messages": (chat["messages"], ask(http, "/tokenize", chat)["tokens"] if num_words == 4 else None),
    }
    for path, field in ((COMPLETION, "prompt"), (CHAT, "messages")):
        prompt, begin = begins[field]
        kept: dict[str | None, list[int]] = {}
        for side in ("left", "right", None):
            body = {field: prompt, "truncate_prompt_tokens": 4, "truncation_side": side, "max_tokens": 1}
            answer = ask(http, path, body | {"return_token_ids": True})
            kept[side] = (answer if path == CHAT else answer["choices"][0])["prompt_token_ids"]
        assert [len(each) for each in kept.values()] == [4] * 3
        assert kept[None] == kept["left"] != kept["right"]
        assert begin is None or kept["right"] == begin[:4]
    body = {"input": text, "truncate_prompt_tokens": 4}
    left, right, same = (
        ask(http, "/v1/embeddings", each | body)["data"][0]["embedding"]
        for each in ({"truncation_side": "left"}, {"truncation_side": "right"}, {"truncation_side": None})
    )
    exact = ask(http, "/v1/embeddings", {"input": begins["prompt"][1][:4]})["data"][0]["embedding"]
    assert left == same and right == pytest.approx(exact, abs=1e-4) and left != pytest.approx(exact, abs=1e-4)
    wrong = http.post(COMPLETION, json=FRANCE | {"truncation_side": "both"})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "truncation_side"


def test_prompt_logprobs_and_echo_logprobs_may_have_different_counts(http: httpx2.Client) -> None:
    body = FRANCE | {"max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": -1}
    (choice,) = ask(http, COMPLETION, body)["choices"]
    assert {len(each) for each in choice["prompt_logprobs"][1:]} == {2048}
    assert all(len(each) <= 2 for each in choice["logprobs"]["top_logprobs"][1:])
