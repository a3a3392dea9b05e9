"""Random answers through the masks of a constraint are calls that the form's parsers read and the schemas allow."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenloom.frontend.forms.answer_forms.form import AnswerForm
from tokenloom.frontend.forms.answer_forms.grammar import (
    begin_of_calls,
    forced_calls,
    form_behind_thought,
    strict_calls,
)
from tokenloom.frontend.forms.answer_forms.named import FORMS, with_also_written
from tokenloom.frontend.forms.parsers.names import new_parsers
from tokenloom.frontend.forms.parsers.parts import CallBegin, parsed
from tokenloom.ipc.params.structured_outputs import StructuredOutputsParams
from tokenloom.tests.frontend.forms.parsers.test_also_written import DSML
from tokenloom.tests.support.call_walks import WalkedVocabulary, fault, phrases_of, read, special_markers

WALKS = 4
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 16},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["city", "days"],
}
FIND: dict[str, Any] = {
    "type": "object",
    "properties": {"q": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "exact": {"type": "boolean"}},
    "required": ["q"],
}
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "find": FIND, "get": {"type": "object", "properties": {}}}


def check_walks(form: AnswerForm, params: StructuredOutputsParams, vocabulary: WalkedVocabulary, begin: str) -> None:
    """Check some random answers that go on from `begin`: a forced one without it."""
    num_whole = 0
    for seed in range(3 * WALKS):
        walk = vocabulary.walk(params, phrases_of(form), random.Random(seed), begin)
        if walk.is_whole and num_whole < WALKS:
            num_whole += 1
            answer = read(form, SCHEMAS, walk.text)
            assert fault(answer, SCHEMAS, SCHEMAS.keys(), is_forced="has_text" not in params.text) == "", walk.text
            assert len(answer.calls) >= len(begin[:1]), walk.text
    assert num_whole


@pytest.mark.parametrize("are_special", [False, True])
@pytest.mark.parametrize("mode", ["forced", "thought", "strict"])
@pytest.mark.parametrize("name", ["granite", "hermes", "lfm2", "mistral", "olmo3", "qwen3_coder", "pythonic"])
def test_random_answers_conform(name: str, mode: str, are_special: bool, tmp_path: Path) -> None:
    form = msgspec.structs.replace(FORMS[name], thought=("<think>\n", "\n</think>\n\n"))
    vocabulary = WalkedVocabulary(tmp_path, special_markers(form) if are_special else ())
    if mode == "strict":
        params = strict_calls(form, SCHEMAS, SCHEMAS.keys(), has_one_call=False, has_text=True)
    else:
        params = forced_calls(form, SCHEMAS, has_one_call=False, may_think=mode == "thought")
    check_walks(form, params, vocabulary, "")


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("form", "marker"),
    [(FORMS["qwen3_coder"], ""), (with_also_written(AnswerForm(calls=(DSML,))), "｜DSML｜")],
    ids=["as text", "with a special token in each tag"],
)
def test_calls_in_text_conform_in_each_form_that_is_read(
    form: AnswerForm, marker: str, number: int, tmp_path: Path
) -> None:
    vocabulary = WalkedVocabulary(tmp_path, [marker] * bool(marker))
    params = strict_calls(form, SCHEMAS, SCHEMAS.keys(), has_one_call=False, has_text=True)
    check_walks(form, params, vocabulary, f"I look. {form.calls[number].start}")


SHARED = "<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="


@pytest.mark.parametrize(
    ("start", "turn_end", "begin"),
    [
        ("<tool_call>\n<function=", "<|end|>", "<tool_call>"),
        ("<call>{ID}", "", ""),
        (SHARED, "<|close|>response<|sep|>", "<|close|>response<|sep|><|open|>tools<|sep|><|open|>"),
    ],
)
def test_constrained_calls_begin_with_a_token_that_begins_nothing_else(start: str, turn_end: str, begin: str) -> None:
    call = msgspec.structs.replace(FORMS["hermes"].calls[0], start=start)
    form = msgspec.structs.replace(FORMS["hermes"], calls=(call,), turn_end=turn_end)
    tokens = {"<tool_call>", "<|close|>", "<|sep|>", "<|open|>"}
    assert begin_of_calls(form, tokens.__contains__) == begin


@pytest.mark.parametrize("begin", ["", "<tool_call>"])
def test_a_call_in_a_thought_that_no_constraint_binds_is_part_of_it(begin: str) -> None:
    form = msgspec.structs.replace(FORMS["qwen3_coder"], thought=("<think>", "</think>"))
    parsers = new_parsers(form_behind_thought(form, begin), {}, is_inside_thought=True)
    call = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    parts = parsed(parsers, f"Hm <function=g></function>{'' if begin else call}</think>{call}", is_last=True)
    assert [part.name for part in parts if isinstance(part, CallBegin)] == ["f"]
