"""Parsers split thought from content wherever the text is cut, and count the tokens of thoughts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.frontend.forms.answer_forms.named import THOUGHTS, ends_inside
from tokenloom.frontend.forms.parsers.parts import Content, Thought
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.messages.base import FinishReason
from tokenloom.ipc.messages.client import Delta
from tokenloom.tests.frontend.forms.parsers.cuts import cut, new_answer_text, parse, thought_parser

PLACES = st.lists(st.integers(0, 100), max_size=6)


@given(st.sampled_from(sorted(THOUGHTS)), st.booleans(), PLACES)
def test_the_text_between_the_markers_is_thought(name: str, is_open: bool, places: list[int]) -> None:
    opening, closing = THOUGHTS[name]
    text = (
        "" if is_open else f"\n{opening}"
    ) + f"why < not{closing[:-2]}{closing}\n\nso: {opening} is text now{closing}"
    thought, content, _ = parse(thought_parser(name, is_open=is_open), cut(text, places))
    assert (thought, content) == (f"why < not{closing[:-2]}", f"so: {opening} is text now{closing}")


@given(st.sampled_from(sorted(THOUGHTS)), PLACES)
def test_an_opening_marker_in_an_open_thought_is_dropped(name: str, places: list[int]) -> None:
    opening, closing = THOUGHTS[name]
    text = f"\n{opening}why{closing}so"
    assert parse(thought_parser(name, is_open=True), cut(text, places))[:2] == ("why", "so")


def test_an_answer_without_a_thought_is_content() -> None:
    assert parse(thought_parser("think", is_open=False), [" pl", "ain"])[:2] == ("", " plain")
    assert parse(thought_parser("think", is_open=True), ["never ", "closed"])[:2] == ("never closed", "")


def test_only_an_opening_marker_at_the_end_opens_a_thought() -> None:
    assert ends_inside("<think>\n") and not ends_inside("<think></think>\n") and not ends_inside("")
    assert ends_inside("[/THINK][THINK]")
    assert not ends_inside("user: what is <think>?\nassistant: "), "a user wrote it"
    assert ends_inside("assistant: <think>so far", is_continued=True)
    assert not ends_inside("assistant: <think>so</think> far", is_continued=True)


def delta(text: str, num_tokens: int, finish_reason: FinishReason | None = None) -> Delta:
    return Delta(request_id="r", token_ids=encode_ids(range(num_tokens)), text=text, finish_reason=finish_reason)


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        ([("<think>", 1), ("one", 1), (" two <", 2), ("/think>", 1), ("\n\nHi", 2)], 4),
        ([("<think>one two</think>abc", 10)], 8),
        ([("plain", 3), (" text", 2)], 0),
        ([("<think>never", 5)], 5),
    ],
)
def test_tokens_of_thoughts_are_counted(deltas: list[tuple[str, int]], expected: int) -> None:
    text = new_answer_text()
    for position, (each, count) in enumerate(deltas):
        text.read(delta(each, count, "stop" if position == len(deltas) - 1 else None))
    assert text.num_thought_tokens == expected


def test_calls_beyond_max_calls_are_dropped() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = new_answer_text(max_calls=1)
    last = delta(f"<think>why</think>Well. {call}{call}", 20, "stop")
    kinds = [type(part).__name__ for part in text.read(last)]
    assert kinds == ["Thought", "Content", "CallBegin", "Arguments", "CallEnd"]
    assert text.finish_reason(last) == "tool_calls"


def test_a_forced_call_may_follow_an_open_thought() -> None:
    text = new_answer_text(is_forced=True, forced_name="f", is_inside_thought=True)
    parts = [*text.read(delta("wh", 1)), *text.read(delta("y</think>{}", 3, "stop"))]
    assert [type(part).__name__ for part in parts] == ["Thought", "Thought", "CallBegin", "Arguments", "CallEnd"]


def test_a_call_of_a_named_function_ends_with_stop() -> None:
    text = new_answer_text(is_forced=True, forced_name="f")
    last = delta("{}", 1, "stop")
    assert not any(isinstance(part, Content | Thought) for part in text.read(last))
    assert text.finish_reason(last) == "stop"
