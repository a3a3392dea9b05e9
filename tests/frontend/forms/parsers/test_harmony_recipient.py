"""A recipient before the first channel belongs to the header of which the prompt has the begin."""

from __future__ import annotations

import pytest

from tokenloom.frontend.forms.parsers.families.harmony import HarmonyParser
from tokenloom.frontend.forms.parsers.parts import Part, whole_calls

CALL = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'


def parts_of(text: str, size: int) -> list[Part]:
    parser = HarmonyParser(has_calls=True)
    parts = [part for begin in range(0, len(text), size) for part in parser.append(text[begin : begin + size])]
    return [*parts, *parser.finish()]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_recipient_before_the_first_channel_makes_a_call(size: int) -> None:
    content, calls = whole_calls(parts_of(CALL, size))
    assert content == ""
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"a": 1}')]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    "text", ["to= x", " to=functions.f", " to=functions.f<|chan", "t", " tomorrow", "to=" + "f" * 300]
)
def test_text_that_is_no_recipient_stays_content(text: str, size: int) -> None:
    assert whole_calls(parts_of(text, size)) == (text, [])
