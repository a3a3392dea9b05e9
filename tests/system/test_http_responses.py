"""/v1/responses accepts a chat's fields and gives the same answers."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

RESPONSE = "/v1/responses"
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
LOGPROBS = "message.output_text.logprobs"
QUESTION = "What is the capital of Peru?"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
def test_logprobs_are_in_the_text_part_of_their_tokens(
    client: openai.OpenAI, asked: dict[str, Any], stream: bool
) -> None:
    made: Any = client.responses.create(model="tokenloom-demo", input=QUESTION, temperature=0, stream=stream, **asked)
    if stream:
        events = list(made)
        deltas = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
        (done,) = (event for event in events if event.type == "response.output_text.done")
        assert [each.token for each in done.logprobs] == [each.token for each in deltas]
        made = events[-1].response
    logprobs = made.output[0].content[0].logprobs
    assert "".join(each.token for each in logprobs).removesuffix("<|end|>") == made.output_text
    assert all(len(each.top_logprobs) == asked.get("top_logprobs", 0) for each in logprobs)


def test_a_response_can_return_raw_prompt_and_answer(http: httpx2.Client) -> None:
    body = {"input": QUESTION, "enable_response_messages": True, "temperature": 0, "max_output_tokens": 5}
    answer = http.post(RESPONSE, json=body).json()
    ((given,), (said,)) = answer["input_messages"], answer["output_messages"]
    assert {given["type"], said["type"]} == {"raw_message_tokens"} and QUESTION in given["message"]
    assert said["message"] == answer["output"][0]["content"][0]["text"]
    for side, count in ((given, "input_tokens"), (said, "output_tokens")):
        assert len(side["tokens"]) == answer["usage"][count]
        assert http.post("/detokenize", json={"tokens": side["tokens"]}).json()["prompt"] == side["message"]


def test_a_cut_answer_has_an_incomplete_item(http: httpx2.Client) -> None:
    cut = http.post(RESPONSE, json={"input": QUESTION, "temperature": 0, "max_output_tokens": 3}).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in cut["output"]] == ["incomplete"]
    tools = [{"type": "function", "name": "look_up_the_weather_of_a_place", "parameters": {"type": "object"}}]
    body = {"input": QUESTION, "tools": tools, "tool_choice": "required", "max_output_tokens": 6}
    (torn,) = http.post(RESPONSE, json=body).json()["output"]
    text = "".join(torn["content"][0]["text"].split())  # the model may draw blanks
    assert (torn["type"], torn["status"]) == ("message", "incomplete")
    assert text and '<tool_call>{"name":"look_up'.startswith(text), f"a call without a name is text: {torn}"
    events = http.post(RESPONSE, json=body | {"stream": True}).text
    assert events.count("response.output_item.added") == events.count("response.output_item.done") == 2


def test_responses_and_their_events_are_of_openais_types(http: httpx2.Client) -> None:
    tools = [{"type": "function", "name": "f", "parameters": SCHEMA}]
    for more in ({}, {"tools": tools, "tool_choice": "required"}, {"top_logprobs": 2, "include": [LOGPROBS]}):
        body = {"input": QUESTION, "max_output_tokens": 24} | more
        Response.model_validate(http.post(RESPONSE, json=body).json())
        lines = http.post(RESPONSE, json=body | {"stream": True}).text.splitlines()
        for line in [line for line in lines if line.startswith("data: ")]:
            EVENT.validate_json(line.removeprefix("data: "))
