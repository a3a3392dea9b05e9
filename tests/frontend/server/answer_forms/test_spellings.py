"""A literal form has the spellings of its template, and grammars of the form take its renderings."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.template_shapes import SHAPES, template_of
from tokenloom.frontend.forms.answer_forms.form import AnswerForm, CallForm
from tokenloom.frontend.forms.answer_forms.grammar import forced_calls
from tokenloom.frontend.forms.answer_forms.named import FORMS
from tokenloom.frontend.server.answer_forms.learn import learn
from tokenloom.frontend.server.answer_forms.probe import PROBES, type_of
from tokenloom.frontend.server.answer_forms.prove import prove, shown_text
from tokenloom.frontend.server.answer_forms.thoughts import learn_thoughts
from tokenloom.ipc.codec import JsonObject
from tokenloom.tests.core.features.grammar.matching import COMPILER, TOKENIZER
from tokenloom.tests.frontend.server.answer_forms.test_learn import renderings_of

TEMPLATE = """{%- macro spell(v) -%}{%- if v is string %}TEXT{% elif v is mapping %}OBJECT{% elif v is iterable %}LIST
{%- else %}WORD{% endif %}{%- endmacro -%}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content or "" }}
{%- for c in m.tool_calls or [] %}{{ "<|calls|>[" if loop.first else ", " }}{{ c.function.name }}(
{%- for k, v in c.function.arguments.items() %}{{ k }}={{ spell(v) }}{{ "" if loop.last else ", " }}{% endfor %})
{{- "]<|end_calls|>" if loop.last else "" }}{% endfor %}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
JSON, RAW, REPR = "{{ v | tojson }}", "'{{ v }}'", "{{ [v] | string | trim('[]') }}"
PRINTED = "{{ v | string }}"
ITEMS = "[{% for e in v %}{{ spell(e) }}{{ '' if loop.last else ', ' }}{% endfor %}]"
PAIRS = "{{ '{' }}{% for k, e in v.items() %}KEY: {{ spell(e) }}{{ '' if loop.last else ', ' }}{% endfor %}{{ '}' }}"
QUOTED, BARE = PAIRS.replace("KEY", "'{{ k }}'"), PAIRS.replace("KEY", "{{ k }}")
NULL = "{% if v is none %}None{% else %}{{ v | tojson }}{% endif %}"
PYTHON_WORDS, JSON_WORDS = ("None", "False", "True"), ("null", "false", "true")
SPELLINGS = {  # TEXT, LIST, OBJECT, WORD of TEMPLATE → the fields of the form
    "raw texts": ((RAW, JSON, JSON, JSON), ("own", "json", "json", JSON_WORDS, False)),
    "python lists": ((RAW, PRINTED, JSON, PRINTED), ("own", "python", "json", PYTHON_WORDS, False)),
    "all JSON": ((JSON, JSON, JSON, JSON), ("json", "json", "json", JSON_WORDS, False)),
    "all python": ((REPR, PRINTED, PRINTED, PRINTED), ("python", "python", "python", PYTHON_WORDS, False)),
    "own lists": ((RAW, ITEMS, BARE, JSON), ("own", "own", "own", JSON_WORDS, True)),
    "own keys": ((RAW, ITEMS, QUOTED, NULL), ("own", "own", "own", ("None", "false", "true"), False)),
}


def source_of(name: str) -> str:
    source = TEMPLATE
    for place, text in zip(("TEXT", "LIST", "OBJECT", "WORD"), SPELLINGS[name][0], strict=True):
        source = source.replace(place, text)
    return source


@pytest.mark.parametrize("name", SPELLINGS)
def test_values_have_the_spellings_of_the_template(name: str) -> None:
    shown = renderings_of(source_of(name))
    form: CallForm = learn(shown, learn_thoughts(shown)).calls[0]
    assert form.kind == "literal"
    assert (form.texts, form.lists, form.objects, form.words, form.has_bare_keys) == SPELLINGS[name][1]


LITERAL = [name for name, shape in SHAPES.items() if shape.kind == "literal"]
SOURCES = [*map(source_of, SPELLINGS), *map(template_of, LITERAL)]


@pytest.mark.parametrize("is_typed", [False, True])
@pytest.mark.parametrize("source", SOURCES)
def test_grammars_take_the_probes_as_the_template_writes_them(source: str, is_typed: bool) -> None:
    shown = renderings_of(source)
    form = learn(shown, learn_thoughts(shown))
    assert [each.probe for each in prove(form, shown) if each.outcome == "different"] == []
    for probe, answer in PROBES:
        if not answer.calls or not answer.calls[0].arguments:
            continue
        tools: dict[str, JsonObject] = {}
        for name, arguments in answer.calls:
            values = {key: {"type": type_of(value)} if is_typed else {} for key, value in arguments.items()}
            tools[name] = {"properties": values, "required": [*values]}
        text, _ = shown_text(shown, msgspec.structs.replace(answer, thought="", content=""))
        assert taken_of(form, tools, text.strip()) == text.strip(), probe


def taken_of(form: AnswerForm, tools: dict[str, JsonObject], text: str) -> str:
    """Return the begin of a text that the grammar of forced calls takes; the whole text only if it may end there."""
    matcher = COMPILER.compile("calls", forced_calls(form, tools, has_one_call=False, may_think=False).text)
    ids = [each for letter in text for each in TOKENIZER.encode(letter, add_special_tokens=False).ids]
    num_taken = matcher.inner.try_consume_tokens(ids)
    if num_taken == len(ids) and matcher.inner.is_accepting():
        return text
    return str(TOKENIZER.decode(ids[:num_taken])) + "…"


def test_the_named_form_takes_texts_as_python_writes_them() -> None:
    for text in ("[f(a='x', b=[True])]", """[f(a="it's", b=["y", 'z'])]""", r"[f(a='it\'s', b={'k': None})]"):
        assert taken_of(FORMS["pythonic"], {"f": {"properties": {"a": {"type": "string"}, "b": {}}}}, text) == text
