"""Forced answers are calls as they come, and a cut one keeps the calls that are complete."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.frontend.openai.parsers.forced import ForcedParser, forcing_schema
from tokenloom.frontend.openai.parsers.parts import Arguments, CallBegin
from tokenloom.ipc.codec import JsonObject
from tokenloom.tests.frontend.openai.parsers.cuts import parse, same_however_it_is_cut

LIST = '[{"name": "f", "parameters": {"a": "]}"}},\n {"name": "g", "parameters": {"b": [1]}} ]'


@given(st.sampled_from([None, "f"]), st.integers(0, len(LIST)), st.lists(st.integers(0, 100), max_size=8))
def test_cuts_change_nothing_for_forced_answers(name: str | None, length: int, places: list[int]) -> None:
    same_however_it_is_cut(lambda: ForcedParser(name), LIST[:length], places)


@pytest.mark.parametrize("length", range(len(LIST) + 1))
def test_nothing_of_a_forced_answer_is_content(length: int) -> None:
    """Cut anywhere, the complete calls are there."""
    complete: list[tuple[str, object]] = [("f", {"a": "]}"})] * (length >= LIST.index("}},") + 1)
    complete += [("g", {"b": [1]})] * (length >= LIST.index("}} ]") + 1)
    assert parse(ForcedParser(None), [LIST[:length]]) == ("", "", complete)


def test_a_named_call_has_the_whole_answer_as_arguments() -> None:
    assert parse(ForcedParser("f"), ['{"a"', ": 1}"]) == ("", "", [("f", {"a": 1})])
    assert parse(ForcedParser("f"), ['{"a"']) == ("", "", [])
    assert parse(ForcedParser("f"), []) == ("", "", [])


def test_names_and_arguments_come_at_once() -> None:
    parser = ForcedParser(None)
    assert parser.append('[{"name": "f"') == []
    begin, arguments = parser.append(', "parameters": {"a": "x')
    assert isinstance(begin, CallBegin) and begin.name == "f"
    assert arguments == Arguments('{"a": "x')
    assert parser.append("y") == [Arguments("y")]


def test_the_forcing_schema_admits_exactly_the_tools() -> None:
    parameters: dict[str, JsonObject] = {"f": {"type": "object"}, "g": {"type": "object", "properties": {}}}
    assert forcing_schema(parameters, "g", is_parallel=True) == parameters["g"]
    schema = forcing_schema(parameters, None, is_parallel=False)
    assert schema["maxItems"] == 1
    forms = schema["items"]["anyOf"]  # type: ignore[index]
    assert [form["properties"]["name"] for form in forms] == [{"const": "f"}, {"const": "g"}]
