"""Answers of templates that transformers reads: parts are equal for any cut, and what is no call stays as content."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.frontend.forms.parsers.cuts import PLACES, check_cuts, parse
from tokenloom.frontend.forms.parsers.parts import Content
from tokenloom.frontend.forms.parsers.response_templates.reader import ResponseTemplateParser

FIELDS: dict[str, Any] = {
    "reasoning_content": {"open": "<think>", "close": "</think>"},
    "tool_calls": {
        "open_pattern": r"\s*<(?:tool|fn)(?: id=(?P<number>\w+))? name=(?P<name>\w+)>",
        "close_pattern": r"</(?:tool|fn)>",
        "content": "kv-lines",
        "repeats": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
    "content": {"close_pattern": r"\s*(?:<end>)"},
}
SCHEMAS = {"f": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}
JSON_CALLS = {"open_pattern": r"<call(?: \d+)?>", "close": "</call>", "content": "json", "repeats": True}
CALL = "<tool name=f>a: 5\nb: 5</tool>"


def new_parser(fields: dict[str, Any] = FIELDS, *, is_inside_thought: bool = False) -> ResponseTemplateParser:
    template = json.dumps({"version": 1, "start_anchor": "<a>", "fields": fields})
    return ResponseTemplateParser(template, SCHEMAS, is_inside_thought=is_inside_thought)


def test_thought_content_and_calls_are_found() -> None:
    text = f"<think>\n why \n</think>\n\nI look.\n {CALL}\n<fn id=3 name=g>\n</fn> done <end>"
    assert parse(new_parser(), [text]) == ("why", "I look.done", [("f", {"a": 5, "b": "5"}), ("g", {})])


def test_answer_that_begins_inside_a_thought() -> None:
    assert parse(new_parser(is_inside_thought=True), ["why</think>yes"]) == ("why", "yes", [])


def test_last_call_needs_no_end() -> None:
    assert parse(new_parser(), [CALL.removesuffix("</tool>")]) == ("", "", [("f", {"a": 5, "b": "5"})])


@pytest.mark.parametrize(
    "body", ["{", "[]", '"f"', '{"name": 1}', '[{"name": "f"}, 2]', '{"name": "f", "arguments": "["}']
)
def test_region_that_is_no_call_is_content(body: str) -> None:
    text = f"<call 7>{body}</call>"
    assert parse(new_parser(FIELDS | {"tool_calls": JSON_CALLS}), ["so ", text]) == ("", f"so{text}", [])


def test_several_calls_of_one_region() -> None:
    text = '<call>[{"name": "f", "arguments": {"b": "é"}}, {"function": {"name": "g", "arguments": "{}"}}]</call>'
    calls = parse(new_parser(FIELDS | {"tool_calls": JSON_CALLS}), [text])[2]
    assert calls == [("f", {"b": "é"}), ("g", {})]


def test_markers_are_the_literal_texts_of_patterns() -> None:
    assert new_parser().markers == ("<think>", "</think>", "<", "tool", "fn", "id=", "name=", ">", "</", "<end>")


TEXTS = st.lists(
    st.sampled_from(
        ["<think>", "</think>", CALL, "<tool name=f>", "</tool>", "a: 1\n", "<fn", " ", "\n", "é", "<end>"]
    ),
    max_size=12,
).map("".join)


@given(TEXTS, PLACES)
def test_cuts_change_nothing(text: str, places: list[int]) -> None:
    check_cuts(new_parser, text, places)


@pytest.mark.parametrize("edge", ["open_pattern", "close_pattern"])
def test_slow_expression_ends_the_parsing_without_a_loss(edge: str) -> None:
    """(a|a)*b takes time that doubles with each character of a text that lacks the b."""
    fields = FIELDS | {"tool_calls": FIELDS["tool_calls"] | {edge: r"<tool name=(?P<name>\w)>|(?:a|a)*b"}}
    if edge == "close_pattern":
        fields["tool_calls"][edge] = "(?:a|a)*b"
    parser, pieces = new_parser(fields), ["so: ", "<tool name=f>", "a" * 64, f"!{CALL}"]
    if edge == "open_pattern":
        del pieces[1]
    parts = [part for piece in pieces for part in parser.append(piece)] + parser.finish()
    assert all(isinstance(part, Content) for part in parts)
    assert "".join(part.text for part in parts if isinstance(part, Content)) == "".join(pieces)
