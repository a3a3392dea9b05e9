"""No parser of a stream takes the square of an answer's length, for any text of the model and any cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import pytest

from tokenloom.frontend.forms.answer_forms.named import FORMS, THOUGHTS
from tokenloom.frontend.forms.anthropic.blocks import partial_object
from tokenloom.frontend.forms.parsers.custom import InputText
from tokenloom.frontend.forms.parsers.forced import ForcedParser
from tokenloom.frontend.forms.parsers.markers import MarkerFinder
from tokenloom.tests.bounds.growth import fast_growth
from tokenloom.tests.frontend.forms.parsers.cuts import call_parser, thought_parser

UNITS = ("a", " ", "[", '\\"', "<")
JSON = ("", '{"name": "', '{"name": "f", "arguments": {"a": "', '{"x": "')
HEADS = {  # the begins of answers, by the parser that they lead into
    "granite": tuple(f"<|tool_call|>[{each}" for each in (*JSON, '{"name": "f", "arguments": {}}')),
    "lfm2": ("<|tool_call_start|>[", "<|tool_call_start|>[f", "<|tool_call_start|>[f(a='", "<|tool_call_start|>[f(), "),
    "hermes": tuple(f"<tool_call>{each}" for each in (*JSON, '{"name": "f", "arguments": {}}')),
    "llama": ("", "<|python_tag|>", *JSON),
    "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS]f", "[TOOL_CALLS]f[CALL_ID]", '[TOOL_CALLS][{"name": "'),
    "olmo3": ("<function_calls>", "<function_calls>f", "<function_calls>f(a='", "<function_calls>f()\n"),
    "pythonic": ("", "[", "[f", "[f(a='", "<|python_start|>"),
    "qwen3_coder": tuple(
        f"<tool_call>{each}"
        for each in (
            "",
            "<function=",
            "<function=f><parameter=",
            "<function=f><parameter=a>",
            "<function=f></function>",
        )
    ),
    "openai": ("", "<|channel|>", "<|channel|>commentary to=functions.f<|message|>{"),
    "forced": ("[", *(f"[{each}" for each in JSON)),
    "custom": ("", "{", '{"input": "', '{"input": "a"'),
    **{f"thought {name}": ("", opening) for name, (opening, _) in THOUGHTS.items()},
    "stop": ("",),
}


class Reader(Protocol):
    """A reader of pieces."""

    def append(self, text: str, /) -> object: ...

    def finish(self) -> object: ...


class Stops:
    """Finder of a stop string that never ends."""

    def __init__(self) -> None:
        self._finder = MarkerFinder("a" * 4095 + "b", " " * 4095 + "b")

    def append(self, text: str) -> object:
        return self._finder.feed(text)

    def finish(self) -> str:
        return self._finder.finish()


def new_reader(name: str) -> Reader:
    kind, _, of_thought = name.partition(" ")
    others: dict[str, Callable[[], Reader]] = {
        "forced": lambda: ForcedParser(None),
        "custom": InputText,
        "thought": lambda: thought_parser(of_thought, is_open=False),
        "stop": Stops,
    }
    return call_parser(kind) if kind in FORMS else others[kind]()


def streaming(name: str, head: str, unit: str, num_characters: int) -> Callable[[], object]:
    reader, text = new_reader(name), head + unit * (num_characters // len(unit))

    def read() -> None:
        for character in text:
            reader.append(character)
        reader.finish()

    return read


def test_every_parser_is_in_the_table() -> None:
    assert {*FORMS, *(f"thought {name}" for name in THOUGHTS)} <= HEADS.keys()


@pytest.mark.parametrize("name", HEADS)
def test_a_stream_takes_time_in_proportion_to_its_length(name: str) -> None:
    for head in HEADS[name]:
        for unit in UNITS:
            slow = fast_growth(partial(streaming, name, head, unit), (8192,), quick_s=0.15)
            assert not slow, f"{name}: {head!r} and then {unit!r}: {slow}"


@pytest.mark.parametrize("unit", [*UNITS, '{"a":', "]", '"a",'])
def test_an_incomplete_object_is_read_in_time_in_proportion_to_its_length(unit: str) -> None:
    def reading(size: int) -> Callable[[], object]:
        return partial(partial_object, '{"a": ' + unit * (size // len(unit)))

    assert not fast_growth(reading, (256_000,), quick_s=0.2)
