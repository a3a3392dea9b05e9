"""Ids of tool_use blocks hold what Anthropic's API takes, and give back the id that the model wrote."""

from __future__ import annotations

import re

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from tokenloom.frontend.forms.anthropic.request_body import MessagesRequest, chat_request
from tokenloom.frontend.forms.anthropic.tool_use_ids import id_of_call, tool_use_id
from tokenloom.frontend.forms.parsers.parts import CallBegin

TAKEN = re.compile(r"[a-zA-Z0-9_-]+")  # by Anthropic's API


@example("functions.get:0")
@example("a-2E")
@example("toolu_own_x")
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_the_id_that_a_model_wrote_comes_back(written: str) -> None:
    shown = tool_use_id(CallBegin("f", written))
    assert TAKEN.fullmatch(shown) and shown.startswith("toolu_")
    assert id_of_call(shown) == written


def test_other_ids_stay_as_they_are() -> None:
    assert re.fullmatch(r"toolu_[0-9a-f]{24}", tool_use_id(CallBegin("f")))
    for given_id in (None, "", "x", "toolu_01A09q90qw90lq917835lq9", "call_1", "toolu_"):
        assert id_of_call(given_id) == given_id


def test_a_damaged_id_is_no_error() -> None:
    assert id_of_call("toolu_own_-FFé-") == "\ufffdé-"


def test_calls_and_results_of_a_conversation_have_the_models_ids() -> None:
    shown = tool_use_id(CallBegin("f", "functions.f:0"))
    use = {"type": "tool_use", "id": shown, "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": shown, "content": "found"}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    body = chat_request(msgspec.convert({"max_tokens": 5, "messages": messages}, MessagesRequest))
    _, called, found = body.messages
    assert [call.id for call in called.tool_calls or ()] == ["functions.f:0"] == [found.tool_call_id]
