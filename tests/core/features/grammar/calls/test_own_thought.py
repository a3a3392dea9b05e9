"""Constrained text may stand behind a thought that the model opens itself, and begins at once without one."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from tokenloom.frontend.forms.answer_forms.form import AnswerForm
from tokenloom.frontend.forms.parsers.machine import AnswerMachine
from tokenloom.frontend.forms.parsers.parts import Content, Thought
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.params.structured_outputs import StructuredOutputsParams
from tokenloom.tests.core.features.grammar.matching import COMPILER, EOS, TOKENIZER, ids_of
from tokenloom.tests.support.today import seeds

THOUGHT = ("<think>", "</think>")
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
EXACT = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 2**60 + 1}}, "required": ["a"]}
CASES: list[tuple[dict[str, Any], str]] = [  # a constraint, and a text that conforms
    ({"json": NUMBER}, '{"a": 1}'),
    ({"json": EXACT}, '{"a": 1152921504606846977}'),
    ({"json": NUMBER, "disable_any_whitespace": True}, '{"a":1}'),
    ({"json_object": True}, '{"x": ["<think>"]}'),
    ({"regex": "ab+"}, "abb"),
    ({"choice": ["no", "yes"]}, "yes"),
    ({"grammar": 'start: "q" r\nr: /z+/'}, "qzz"),
    ({"grammar": 'root ::= "q" [z]+'}, "qzz"),
]


def conforms(params: StructuredOutputsParams, text: str) -> bool:
    matcher = COMPILER.compile(params.kind, params.text)
    for token_id in TOKENIZER.encode(text, add_special_tokens=False).ids:
        matcher.consume([token_id])
        if matcher.error is not None:
            return False
    return bool(matcher.inner.is_accepting())


@pytest.mark.parametrize(("fields", "text"), CASES)
@pytest.mark.parametrize("edges", [THOUGHT, ("<think>\n", "\n</think>\n\n"), ("[THINK]", "[/THINK]")])
def test_a_thought_may_come_first(edges: tuple[str, str], fields: dict[str, Any], text: str) -> None:
    params = msgspec.structs.replace(StructuredOutputsParams(**fields), thought=edges)
    opening, closing = (each.strip() for each in edges)
    thoughts = (f"{opening}{closing}", f'\n{opening}\nHm {{"a": 1}} {closing[:-1]}\n{closing}\n\n')
    for before in ("", *thoughts):
        assert conforms(params, before + text), before
    for before in ("So ", "\n", opening, f"{opening}Hm.", f"Hm.{closing}", f"{thoughts[0]} Hm.", thoughts[0] * 2):
        assert not conforms(params, before + text), before
    assert not conforms(params, thoughts[0])


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"json": {"type": "x"}}, "json"), ({"regex": "("}, "regex"), ({"grammar": "start"}, "grammar")],
)
def test_an_error_names_the_field_of_the_constraint(fields: dict[str, Any], field: str) -> None:
    params = msgspec.structs.replace(StructuredOutputsParams(**fields), thought=THOUGHT)
    with pytest.raises(RequestError, match=rf"structured_outputs\.{field}\b"):
        COMPILER.compile(params.kind, params.text)


def test_a_thought_has_two_texts() -> None:
    assert StructuredOutputsParams.of({"regex": "a", "thought": ["<think>", "</think>"]}).thought == THOUGHT
    with pytest.raises(RequestError, match="thought must be two texts"):
        StructuredOutputsParams.of({"regex": "a", "thought": ["", "</think>"]})


def walk(params: StructuredOutputsParams, draw: random.Random) -> str | None:
    """Return a random answer that ends by itself; None if it does not. Thoughts are begun, and ended, often."""
    matcher = COMPILER.compile(params.kind, params.text)
    words = np.zeros(COMPILER.num_words, np.uint32)
    taken: list[int] = []
    pushed = TOKENIZER.encode(draw.choice(("", "<think>Hm", "<think>\n")), add_special_tokens=False).ids
    while len(taken) < 200:
        matcher.fill(words)
        allowed = ids_of(words)
        assert matcher.error is None and allowed
        text = TOKENIZER.decode(taken, skip_special_tokens=False)
        is_thinking = text.lstrip().startswith("<think>") and "</think>" not in text
        is_inside_character = text.endswith("\N{REPLACEMENT CHARACTER}")
        if not pushed and is_thinking and not is_inside_character and draw.random() < 0.2:
            pushed = TOKENIZER.encode("</think>", add_special_tokens=False).ids
        token_id = pushed.pop(0) if pushed else draw.choice(allowed)
        assert token_id in allowed
        if token_id == EOS:
            return text
        taken.append(token_id)
        matcher.consume([token_id])
        if matcher.is_complete:
            return TOKENIZER.decode(taken, skip_special_tokens=False)
    return None


@pytest.mark.parametrize("seed", seeds(2, 20))
def test_walks_are_read_as_a_thought_and_conforming_text(seed: int) -> None:
    draw = random.Random(seed)
    params = StructuredOutputsParams(json={**NUMBER, "additionalProperties": False}, thought=THOUGHT)
    num_thoughts = num_whole = 0
    for _ in range(30):
        text = walk(params, draw)
        if text is None:
            continue
        machine = AnswerMachine(AnswerForm(thought=THOUGHT), {})
        parts = [*machine.append(text), *machine.finish()]
        num_whole += 1
        num_thoughts += any(isinstance(part, Thought) for part in parts)
        said = "".join(part.text for part in parts if isinstance(part, Content))
        jsonschema.validate(json.loads(said), NUMBER)
    assert num_whole > 10 and num_thoughts > 2
