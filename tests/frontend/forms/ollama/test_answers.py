"""Answers in Ollama's form: streams and whole answers say the same."""

from __future__ import annotations

from typing import Any

import pytest

from tokenloom.frontend.forms.ollama.answers import AnswerWriter, ending, time_text
from tokenloom.frontend.forms.parsers.parts import Content, Part, Thought, call
from tokenloom.ipc.messages.client import RequestMetrics

CALL = {"function": {"index": 0, "name": "f", "arguments": {"a": 1}}}
PARTS: list[Part] = [
    Thought("hm "),
    Thought("so"),
    Content("\n\n"),
    Content("Lima"),
    Content("."),
    *call("f", '{"a": 1}', "raw"),
]


def without_id(message: dict[str, Any]) -> dict[str, Any]:
    for each in message.get("tool_calls", []):
        assert each.pop("id").startswith("call_")
    return message


def test_the_lines_of_a_chat_join_to_its_whole_answer() -> None:
    writer = AnswerWriter("m", is_chat=True)
    lines: list[Any] = [line for part in PARTS for line in writer.lines([part], 0.0)]
    assert all(line["model"] == "m" and line["done"] is False for line in lines)
    messages = [without_id(line["message"]) for line in lines]
    whole: Any = AnswerWriter("m", is_chat=True).whole(PARTS, 0.0)
    message = without_id(whole["message"])
    assert message == {"role": "assistant", "content": "\n\nLima.", "thinking": "hm so", "tool_calls": [CALL]}
    assert "".join(each.get("thinking", "") for each in messages) == message["thinking"]
    assert "".join(each["content"] for each in messages) == message["content"]
    assert [each["tool_calls"] for each in messages if "tool_calls" in each] == [message["tool_calls"]]


def test_a_call_whose_arguments_are_no_object_is_content() -> None:
    whole: Any = AnswerWriter("m", is_chat=True).whole(call("f", "[1", "<tool_call>f"), 0.0)
    assert whole["message"] == {"role": "assistant", "content": "<tool_call>f"}


def test_a_generated_text_keeps_its_white_space() -> None:
    writer = AnswerWriter("m", is_chat=False)
    parts: list[Part] = [Content(" "), Content("Lima")]
    lines: list[Any] = list(writer.lines(parts, 0.0))
    assert "".join(line["response"] for line in lines) == " Lima"
    whole: Any = AnswerWriter("m", is_chat=False).whole(parts, 0.0)
    assert whole["response"] == " Lima" and "thinking" not in whole


def test_the_end_has_counts_and_times_in_nanoseconds() -> None:
    metrics = RequestMetrics(arrival_time=1.0, first_scheduled_time=1.5, first_token_time=2.0, finished_time=4.0)
    assert ending("length", metrics, 7, 9, 5.0) == {
        "done": True,
        "done_reason": "length",
        "total_duration": 3_000_000_000,
        "load_duration": 500_000_000,
        "prompt_eval_count": 7,
        "prompt_eval_duration": 500_000_000,
        "eval_count": 9,
        "eval_duration": 2_000_000_000,
    }


@pytest.mark.parametrize("metrics", [RequestMetrics(), RequestMetrics(arrival_time=9.0)])
def test_times_that_are_missing_are_never_negative(metrics: RequestMetrics) -> None:
    found = ending("stop", metrics, 1, 1, 5.0)
    assert all(found[name] >= 0 for name in found if name.endswith("_duration"))  # type: ignore[operator]


def test_a_time_has_the_form_of_rfc_3339() -> None:
    assert time_text(0.25) == "1970-01-01T00:00:00.250000Z"
