"""Forced answers are calls; an incomplete answer keeps its complete calls, and the rest is content."""

from __future__ import annotations

import pytest

from tokenloom.frontend.forms.parsers.forced import ForcedParser, forcing_schema
from tokenloom.frontend.forms.parsers.parts import Arguments, CallBegin
from tokenloom.ipc.codec import JsonObject
from tokenloom.tests.frontend.forms.parsers.cuts import parse

LIST = '[{"name": "f", "parameters": {"a": "]}"}},\n {"name": "g", "parameters": {"b": [1]}} ]'


@pytest.mark.parametrize("length", range(len(LIST) + 1))
def test_an_answer_that_ends_anywhere_keeps_its_complete_calls_and_the_text_behind_them(length: int) -> None:
    complete: list[tuple[str, object]] = [("f", {"a": "]}"})] * (length >= LIST.index("}},") + 1)
    complete += [("g", {"b": [1]})] * (length >= LIST.index("}} ]") + 1)
    text = LIST[:length]
    thought, content, calls = parse(ForcedParser(None), [text])
    assert (thought, calls) == ("", complete)
    ends = [0, LIST.index("}},") + 2, LIST.index("}} ]") + 2]
    rest = text[ends[len(calls)] :]
    assert content == (rest if not calls or rest.strip("[,] \n") else "")


def test_the_whole_answer_is_the_arguments_of_the_named_function() -> None:
    assert parse(ForcedParser("f"), ['{"a"', ": 1}"]) == ("", "", [("f", {"a": 1})])
    assert parse(ForcedParser("f"), ['{"a"', ": "]) == ("", '{"a": ', []), "a cut call is content"
    assert parse(ForcedParser("f"), []) == ("", "", [])


def test_names_and_arguments_stream() -> None:
    parser = ForcedParser(None)
    assert parser.append('[{"name": "f"') == []
    begin, arguments = parser.append(', "parameters": {"a": "x')
    assert isinstance(begin, CallBegin) and begin.name == "f"
    assert arguments == Arguments('{"a": "x')
    assert parser.append("y") == [Arguments("y")]


def test_the_forcing_schema_allows_exactly_the_tools() -> None:
    parameters: dict[str, JsonObject] = {"f": {"type": "object"}, "g": {"type": "object", "properties": {}}}
    assert forcing_schema(parameters, "g", is_parallel=True) == parameters["g"]
    schema = forcing_schema(parameters, None, is_parallel=False)
    assert schema["maxItems"] == 1
    forms = schema["items"]["anyOf"]  # type: ignore[index]
    assert [form["properties"]["name"] for form in forms] == [{"const": "f"}, {"const": "g"}]
    own: JsonObject = {"properties": {"a": {"$ref": "#/$defs/n"}, "again": {"$ref": "#"}}, "$defs": {"n": {}}}
    moved = forcing_schema({"f": own, "g": own}, None, is_parallel=True)["$defs"]["f1"]  # type: ignore[index]
    assert moved["properties"] == {"a": {"$ref": "#/$defs/f1/$defs/n"}, "again": {"$ref": "#/$defs/f1"}}
