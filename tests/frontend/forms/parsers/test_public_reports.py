"""Faults that users reported of other servers' parsers, and that this one never had. Each test names the report."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.frontend.forms.parsers.families.llama import LlamaParser
from tokenloom.frontend.forms.parsers.forced import ForcedParser
from tokenloom.frontend.forms.parsers.parts import CallBegin, Part, Thought, whole_calls
from tokenloom.ipc.messages.client import Delta
from tokenloom.tests.frontend.forms.parsers.cuts import call_parser, cut, new_answer_text, parse, parts_of

PLACES = st.lists(st.integers(0, 1000), max_size=8)


@pytest.mark.parametrize("marker", ["</tool_call>", "<tool_call>", '</tool_call>{"name": "g"}'])
@given(places=PLACES)
def test_a_marker_in_an_argument_is_text_of_the_argument(marker: str, places: list[int]) -> None:
    """vllm-project/vllm#45167."""
    arguments = {"text": f"write {marker} here"}
    text = f'<tool_call>{{"name": "f", "arguments": {json.dumps(arguments)}}}</tool_call>'
    assert parse(call_parser("hermes"), cut(text, places)) == ("", "", [("f", arguments)])


@given(value=st.text(max_size=20), is_ascii=st.booleans(), places=PLACES)
def test_escapes_and_surrogate_pairs_of_arguments_stay_whole(value: str, is_ascii: bool, places: list[int]) -> None:
    """sgl-project/sglang#12626."""
    text = json.dumps({"name": "f", "parameters": {"a": value}}, ensure_ascii=is_ascii)
    assert parse(LlamaParser(), cut(text, places)) == ("", "", [("f", {"a": value})])


@pytest.mark.parametrize("name", [None, "f"])
@given(places=PLACES)
def test_forced_calls_stream_as_the_whole_text_with_one_id_each(name: str | None, places: list[int]) -> None:
    """vllm-project/vllm#24509."""
    one = {"a": [1, {"b": "]}"}]}
    called = [{"name": "f", "parameters": one}, {"name": "f", "parameters": {}}]
    text, calls = (json.dumps(one), [one]) if name else (json.dumps(called), [one, {}])
    parts = parts_of(ForcedParser(name), cut(text, places))
    content, found = whole_calls(parts)
    assert (content, [(call.name, json.loads(call.arguments)) for call in found]) == (
        "",
        [("f", each) for each in calls],
    )
    ids = [part.id for part in parts if isinstance(part, CallBegin)]
    assert len(set(ids)) == len(ids) == len(calls) and ids == [call.id for call in found]


@given(places=PLACES)
def test_white_space_of_a_text_argument_is_kept(places: list[int]) -> None:
    """vllm-project/vllm#48753."""
    value = "  indented\n\n\tlast line  \n"
    text = f"<tool_call><function=f><parameter=a>\n{value}\n</parameter></function></tool_call>"
    schemas = {"f": {"properties": {"a": {"type": "string"}}}}
    assert parse(call_parser("qwen3_coder", schemas), cut(text, places)) == ("", "", [("f", {"a": value})])


@given(places=PLACES)
def test_a_call_in_a_thought_that_never_ends_is_thought(places: list[int]) -> None:
    """vllm-project/vllm#16511: the thought is whole, and no call is claimed."""
    thought = 'Let me see. <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    pieces = cut(f"<think>{thought}", places)
    reader, parts = new_answer_text(), list[Part]()
    for number, piece in enumerate(pieces, 1):
        last = Delta(request_id="", text=piece, finish_reason="stop" if number == len(pieces) else None)
        parts += reader.read(last)
    assert all(isinstance(part, Thought) for part in parts)
    assert "".join(part.text for part in parts if isinstance(part, Thought)) == thought
    assert reader.finish_reason(last) == "stop"
