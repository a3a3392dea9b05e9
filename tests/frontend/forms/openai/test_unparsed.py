"""An answer with a call that was not read is reported once, by its reason and its shape, never by its words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from tokenloom.frontend.forms.openai.text import AnswerText
from tokenloom.frontend.forms.openai.unparsed import MAX_SHAPE, UnparsedCall, telling_marker
from tokenloom.ipc.messages.base import FinishReason
from tokenloom.ipc.messages.client import Delta
from tokenloom.tests.frontend.forms.parsers.cuts import ANSWERS, PLACES, cut, new_style

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
OTHER = "<tool_call><function=ask><parameter=who>Ann, 42</parameter></function></tool_call>"
SHAPE = "<tool_call><xxxxxxxx=xxx><xxxxxxxxx=xxx>Xxx, 00</xxxxxxxxx></xx"
TORN = '<tool_call>{"name": "f", "arguments": {"x": nope}}</tool_call>'


def unparsed(pieces: list[str], reason: FinishReason = "stop", **changes: Any) -> list[UnparsedCall]:
    found: list[UnparsedCall] = []
    text = AnswerText(new_style(**changes), found.append)
    for position, piece in enumerate(pieces):
        end = reason if position == len(pieces) - 1 else None
        text.read(Delta(request_id="r", text=piece, finish_reason=end))
    return found


@pytest.mark.parametrize(
    ("answer", "reason", "expected"),
    [
        ("no call", "stop", []),
        (CALL, "stop", []),
        (f"I ask. {CALL}{CALL}", "length", []),
        (f"I ask. {OTHER}", "stop", ["marker"]),
        ("Write <tool_call> first.", "stop", ["marker"]),
        (TORN, "stop", ["arguments"]),
        (CALL + TORN + OTHER, "stop", ["arguments"]),
        (CALL[:30], "length", ["cut"]),
        (CALL[:50], "length", []),
        ("<tool_call", "stop", []),
        ("<think>Use <tool_call>?</think>No.", "stop", []),
    ],
)
def test_a_call_that_is_not_read_has_a_reason(answer: str, reason: FinishReason, expected: list[str]) -> None:
    assert [each.reason for each in unparsed([answer], reason)] == expected


def test_letters_and_digits_of_the_answer_do_not_leave_it() -> None:
    (call,) = unparsed([f"Secret {OTHER}"])
    assert call == UnparsedCall("marker", "<tool_call>", SHAPE.replace("X", "x")[:MAX_SHAPE])
    (call,) = unparsed([TORN.replace("nope", "Jörg 7 漢字")])
    assert call.shape == '<tool_call>{"xxxx": "x", "xxxxxxxxx": {"x": xxxx 0 xx}}</xxxx_xxxx>'[:MAX_SHAPE]


@given(ANSWERS, PLACES)
def test_reports_do_not_depend_on_the_deltas(answer: str, places: list[int]) -> None:
    assert [each.reason for each in unparsed(cut(answer, places))] == [each.reason for each in unparsed([answer])]
    assert unparsed(cut(OTHER + answer, places)) == unparsed([OTHER + answer])


def test_a_form_without_a_marker_reports_torn_arguments_alone() -> None:
    assert unparsed(['[a list] {"name": 5}'], tool_parser="pythonic") == []
    assert [each.reason for each in unparsed(["[f(x=nope)]"], tool_parser="pythonic", schemas={"f": {}})] == [
        "arguments"
    ]
    assert unparsed([OTHER], tool_parser="none") == []


@pytest.mark.parametrize(
    ("text", "marker"),
    [
        ("<tool_call>\n{", "<tool_call>"),
        ("\n<function=", "<function"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_calls_section_begin|>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>"),
        ("[TOOL_CALLS]", "[TOOL_CALLS]"),
        ("[", ""),
        ('{"name": "', ""),
        ("", ""),
    ],
)
def test_the_first_marker_of_a_form_is_a_text_that_content_seldom_has(text: str, marker: str) -> None:
    assert telling_marker(text) == marker
    assert telling_marker("") == ""
