"""Random answers through the masks of a constraint are calls that the form's parsers read and the schemas allow."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenloom.frontend.forms.answer_forms.grammar import forced_calls, strict_calls
from tokenloom.frontend.forms.answer_forms.named import FORMS
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


@pytest.mark.parametrize("are_special", [False, True])
@pytest.mark.parametrize("mode", ["forced", "thought", "strict"])
@pytest.mark.parametrize("name", ["hermes", "mistral", "qwen3_coder", "pythonic"])
def test_random_answers_conform(name: str, mode: str, are_special: bool, tmp_path: Path) -> None:
    form = msgspec.structs.replace(FORMS[name], calls=FORMS[name].calls[:1], thought=("<think>\n", "\n</think>\n\n"))
    vocabulary = WalkedVocabulary(tmp_path, special_markers(form) if are_special else ())
    if mode == "strict":
        params = strict_calls(form, SCHEMAS, SCHEMAS.keys(), has_one_call=False, has_text=True)
    else:
        params = forced_calls(form, SCHEMAS, has_one_call=False, may_think=mode == "thought")
    num_whole = 0
    for seed in range(3 * WALKS):
        walk = vocabulary.walk(params, phrases_of(form), random.Random(seed))
        if walk.is_whole and num_whole < WALKS:
            num_whole += 1
            answer = read(form, SCHEMAS, walk.text)
            assert fault(answer, SCHEMAS, SCHEMAS.keys(), is_forced=mode != "strict") == "", walk.text
    assert num_whole
