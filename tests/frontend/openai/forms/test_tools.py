"""Tool calls and reasoning come out of a text the same however it is cut into pieces, and nothing is lost."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokenloom.frontend.openai.forms.text import ReasoningSplitter, ends_inside, held_back
from tokenloom.frontend.openai.forms.tools import (
    ForcedParser,
    HermesParser,
    LlamaParser,
    ToolParser,
    find_parser,
    forcing_schema,
)

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PIECES = [CALL, "plain ", "<tool", "_call>", "</tool_call>", "{", "<", '{"name": 1}', "<tool_call>x</tool_call>", "\n"]
Parsed = tuple[str, list[tuple[str, object]]]


def parse(parser: ToolParser, pieces: list[str]) -> Parsed:
    content, calls = "", []
    for told, made in (*map(parser.append, pieces), parser.finish()):
        content += told
        calls += [(call.name, json.loads(call.arguments)) for call in made]
    return content, calls


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@given(st.lists(st.sampled_from(PIECES), max_size=6), st.lists(st.integers(0, 10_000), max_size=8))
@example([CALL, "{", CALL, "{", "\n"], [len(CALL) * 2 + 2])
@example([CALL, "\n", "<tool_call>x</tool_call>"], [len(CALL) + 1])
def test_cuts_change_nothing_for_hermes(parts: list[str], places: list[int]) -> None:
    text = "".join(parts)
    assert parse(HermesParser(), cut(text, places)) == parse(HermesParser(), [text])


@given(st.lists(st.sampled_from(PIECES), max_size=6), st.lists(st.integers(0, 10_000), max_size=8))
def test_cuts_change_nothing_for_llama(parts: list[str], places: list[int]) -> None:
    text = "".join(parts)
    assert parse(LlamaParser(), cut(text, places)) == parse(LlamaParser(), [text])


@given(st.text(alphabet="<tol_cal>/{} ab", max_size=40))
def test_text_without_a_call_is_content_unchanged(text: str) -> None:
    assert parse(HermesParser(), list(text)) == (text, [])


def test_hermes_calls_in_parallel_with_content_before_them() -> None:
    text = f"Let me see.\n{CALL}\n{CALL.replace('1', '2')}"
    assert parse(HermesParser(), list(text)) == ("Let me see.\n", [("add", {"a": 1}), ("add", {"a": 2})])


def test_a_call_whose_closing_marker_never_came_counts_if_its_json_is_whole() -> None:
    assert parse(HermesParser(), [CALL.removesuffix("</tool_call>")]) == ("", [("add", {"a": 1})])
    torn = CALL[:30]
    assert parse(HermesParser(), [torn]) == (torn, [])


@pytest.mark.parametrize("prefix", ["", "<|python_tag|>", "\n"])
def test_llama_writes_parameters_and_more_calls_after_a_semicolon(prefix: str) -> None:
    text = prefix + '{"name": "f", "parameters": {"x": "é"}}; {"name": "g", "parameters": {}}'
    assert parse(LlamaParser(), list(text)) == ("", [("f", {"x": "é"}), ("g", {})])
    assert parse(LlamaParser(), ['{"a": 1}']) == ('{"a": 1}', [])


def test_forced_answers_are_calls_and_a_torn_list_is_content() -> None:
    assert parse(ForcedParser("f"), ['{"a"', ": 1}"]) == ("", [("f", {"a": 1})])
    assert parse(ForcedParser(None), ['[{"name": "f", "parameters": {}}]']) == ("", [("f", {})])
    assert parse(ForcedParser(None), ['[{"name": "f"']) == ('[{"name": "f"', [])


def test_the_forcing_schema_admits_exactly_the_tools() -> None:
    parameters = {"f": {"type": "object"}, "g": {"type": "object"}}
    assert forcing_schema(parameters, "g", is_parallel=True) == parameters["g"]
    schema = forcing_schema(parameters, None, is_parallel=False)
    assert schema["maxItems"] == 1
    forms = schema["items"]["anyOf"]  # type: ignore[index]
    assert [form["properties"]["name"] for form in forms] == [{"const": "f"}, {"const": "g"}]


def test_the_template_says_how_calls_are_written() -> None:
    assert find_parser("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert find_parser('{% if tools %}{"name": …, "parameters": …}{% endif %}') == "llama"
    assert find_parser("{{ messages }}") == "none"


def split(text: str, places: list[int], is_open: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(is_open=is_open)
    parts = [*map(splitter.append, cut(text, places)), splitter.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@given(st.booleans(), st.lists(st.integers(0, 100), max_size=6))
def test_reasoning_is_what_stands_between_the_markers(is_open: bool, places: list[int]) -> None:
    text = ("" if is_open else "<think>") + "why < not</thin</think>" + "so: <think> is text now</think>"
    assert split(text, places, is_open) == ("why < not</thin", "so: <think> is text now</think>")


@given(st.text(alphabet="<think>/ a", max_size=30), st.lists(st.integers(0, 100), max_size=6), st.booleans())
def test_cuts_change_nothing_for_reasoning(text: str, places: list[int], is_open: bool) -> None:
    assert split(text, places, is_open) == split(text, [], is_open)


def test_an_answer_without_thoughts_is_content() -> None:
    assert split(" plain", [1, 2], is_open=False) == ("", " plain")
    assert split("never closed", [3], is_open=True) == ("never closed", "")


def test_markers_at_an_end() -> None:
    assert held_back("ab</thi", "</think>") == 5
    assert held_back("ab", "</think>") == 0
    assert ends_inside("<think>\n") and not ends_inside("<think></think>\n") and not ends_inside("")
