"""Earlier answers with calls reach each template in the form that it shows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import ChatForm, ChatMessage, TextPart

ARGUMENTS = {"city": "Lima", "days": [1, None]}
TEXT = '{"city":"Lima","days":[1,null]}'  # as a model wrote it
LOOP = "{% for m in messages %}{{ '<' + m.role + '>' }}"
CALLS = "{% for t in m['tool_calls'] %}CALLS{% endfor %}"
OBJECT, JOINED = (
    "{{ t.function.name }}{{ t.function.arguments | tojson }}",
    "{{ t.function.name + t.function.arguments }}",
)
TEMPLATES = {  # the call of each is shown as get and its arguments in JSON
    "hermes": LOOP + "{{ m.content or '' }}" + CALLS.replace("CALLS", OBJECT) + "{% endfor %}",
    "null alone": LOOP
    + "{% if m.role == 'assistant' and m.content is none %}"
    + CALLS.replace("CALLS", JOINED)
    + "{% elif m.content is not none %}{{ m.content }}{% endif %}{% endfor %}",
    "joined text": LOOP + "{{ m.content }}" + CALLS.replace("CALLS", JOINED) + "{% endfor %}",
    "printed": LOOP
    + "{{ m.content or '' }}"
    + CALLS.replace("CALLS", "{{ t.function.name }}{{ t.function.arguments }}")
    + "{% endfor %}",
    "either": LOOP
    + "{{ m.content or '' }}"
    + CALLS.replace(
        "CALLS", "{{ t.function.name }}{{ t.function.arguments if t.function.arguments is string else 0 / 0 }}"
    )
    + "{% endfor %}",
    "parts": LOOP
    + "{% for p in m.content %}{{ p.text }}{% endfor %}"
    + CALLS.replace("CALLS", OBJECT)
    + "{% endfor %}",
    "only with tools": LOOP
    + "{{ m.content or '' }}{% if tools %}"
    + CALLS.replace("CALLS", JOINED)
    + "{% endif %}{% endfor %}",
    "calls instead of text": LOOP
    + "{% if m.tool_calls %}"
    + CALLS.replace("CALLS", OBJECT)
    + "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "concatenated": LOOP + "{{ m.content + '' }}" + CALLS.replace("CALLS", OBJECT) + "{% endfor %}",
    "nine characters": LOOP
    + "{{ m.content or '' }}"
    + CALLS.replace("CALLS", "{% if t.id | length != 9 %}{{ raise_exception('id') }}{% endif %}" + OBJECT)
    + "{% endfor %}",
}


def call(arguments: object = TEXT) -> dict[str, Any]:
    return {
        "tool_calls": [{"id": "123456789", "type": "function", "function": {"name": "get", "arguments": arguments}}]
    }


def render(name: str, content: Any, more: dict[str, Any]) -> str:
    messages = [ChatMessage("user", "W?"), ChatMessage("assistant", content, more), ChatMessage("tool", "20")]
    form = ChatForm(variables={"tools": [{"type": "function", "function": {"name": "get"}}]})
    return ChatTemplate("{# tools #}" + TEMPLATES[name], {}).render(messages, form)


def arguments_in(rendered: str) -> object:
    return json.loads(rendered.partition("get")[2].partition("<")[0])


@pytest.mark.parametrize("content", [None, "", [], [TextPart("")]], ids=["null", "text", "list", "part"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_without_text_are_in_the_prompt(name: str, content: Any) -> None:
    for arguments in (TEXT, ARGUMENTS):
        rendered = render(name, content, call(arguments))
        before, _, after = rendered.partition("get")
        assert (before, after[after.index("<") :]) == ("<user>W?<assistant>", "<tool>20")
        assert arguments_in(rendered) == ARGUMENTS
        assert "None" not in rendered and "'city'" not in rendered


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_its_calls_are_both_in_the_prompt(name: str) -> None:
    rendered = render(name, "I look.", call())
    assert rendered.startswith("<user>W?<assistant>I look.") and rendered.endswith("<tool>20")
    assert arguments_in(rendered) == ARGUMENTS


def test_a_template_that_refuses_two_turns_of_the_assistant_gets_one() -> None:
    alternates = "{% if messages[1].role == messages[2].role %}{{ raise_exception('roles alternate') }}{% endif %}"
    template = ChatTemplate(alternates + TEMPLATES["calls instead of text"], {})
    rendered = template.render(
        [ChatMessage("user", "W?"), ChatMessage("assistant", "I look.", call()), ChatMessage("tool", "20")]
    )
    assert arguments_in(rendered) == ARGUMENTS
    assert "I look." not in rendered


def test_a_template_of_texts_gets_the_text_that_the_model_wrote() -> None:
    for name in ("null alone", "joined text", "printed", "either"):
        assert TEXT in render(name, None, call())
        assert 'get{"city": "é"' in render(name, None, call({"city": "é"}))


@pytest.mark.parametrize("given", ["", " ", None, {}, "{}"])
def test_no_arguments_are_an_empty_object(given: object) -> None:
    for name in TEMPLATES:
        assert arguments_in(render(name, None, call(given))) == {}


@pytest.mark.parametrize("given", ['{"a":', "[1]", "[" * 5000])
def test_a_torn_call_stays_as_it_is_or_is_empty(given: str) -> None:
    assert f"get{given}<" in render("joined text", None, call(given))
    assert "get{}<" in render("hermes", None, call(given))


def test_a_template_that_shows_no_calls_gets_empty_texts_and_objects() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}{# tool #}", {})
    assert template.render([ChatMessage("user", "W?"), ChatMessage("assistant", None, call())]) == "[W?][]"
    strict = ChatTemplate("{{ messages[-1].tool_calls[0].function.arguments.city + messages[-1].content }}", {})
    assert strict.render([ChatMessage("user", "W?"), ChatMessage("assistant", None, call())]) == "Lima"


def test_calls_of_another_form_are_an_error_of_the_template_at_most() -> None:
    for calls in ([5], [{"function": 5}], [{"function": {"name": "get"}}], "text", {"a": 1}):
        for name in ("hermes", "null alone"):
            try:
                render(name, None, {"tool_calls": calls})
            except RequestError as error:
                assert "the chat template refuses these messages" in str(error)


def test_the_form_is_found_once() -> None:
    rendered: list[str] = []
    source = "{{ seen() }}" + TEMPLATES["null alone"]
    template = ChatTemplate(source, {}, defaults={"seen": lambda: rendered.append("") or ""})
    messages = [ChatMessage("user", "W?"), ChatMessage("assistant", None, call())]
    template.render(messages)
    num_first = len(rendered)
    template.render(messages)
    assert (num_first > 2, len(rendered)) == (True, num_first + 1)
    plain = ChatTemplate(source, {}, defaults={"seen": lambda: rendered.append("") or ""})
    rendered.clear()
    plain.render(messages[:1])
    assert len(rendered) <= 2, "a chat without calls pays nothing for them"


@pytest.mark.parametrize("given", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content", "thinking", "thought"])
def test_a_template_finds_a_thought_under_its_name(read: str, given: str) -> None:
    template = ChatTemplate(f"{{% for m in messages %}}[{{{{ m.{read} }}}}{{{{ m.content }}}}]{{% endfor %}}", {})
    assert template.render([ChatMessage("user", "W?"), ChatMessage("assistant", "so", {given: "why"})]) == "[W?][whyso]"


GPT_OSS = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.content and m.thinking %}{{ raise_exception('both') }}"
    "{% endif %}{{ m.thinking or m.content }}{% for t in m.tool_calls %}{{ t.function.name }}{% endfor %}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(("content", "expected"), [(None, "whyget"), ("", "whyget"), ("I look.", "I look.get")])
def test_a_thought_beside_text_and_calls_fails_in_no_template(content: str | None, expected: str) -> None:
    turns = [ChatMessage("user", "W?"), ChatMessage("assistant", content, call() | {"reasoning_content": "why"})]
    assert ChatTemplate(GPT_OSS, {}).render(turns) == expected


EITHER_FORM = (
    LOOP + "{{ m.content or '' }}" + CALLS.replace("CALLS", "{{ t.function.name }}SHOWN") + "{% endfor %}"
)  # SHOWN: the arguments, which may be text
SHOWN = "{% if t.function.arguments is string %}{{ t.function.arguments }}{% else %}OBJECT{% endif %}"
OTHERWISE = {
    "the same": "{{ t.function.arguments | tojson }}",
    "indented": "{{ t.function.arguments | tojson(indent=1) }}",
    "tags": "{% for k, v in t.function.arguments | items %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}",
}


@pytest.mark.parametrize("form", OTHERWISE)
def test_text_stays_as_the_model_wrote_it_if_the_template_shows_objects_alike(form: str) -> None:
    source = "{# tools #}" + EITHER_FORM.replace("SHOWN", SHOWN.replace("OBJECT", OTHERWISE[form]))
    chat = [ChatMessage("user", "W?"), ChatMessage("assistant", None, call()), ChatMessage("tool", "20")]
    assert (f"get{TEXT}<" in ChatTemplate(source, {}).render(chat)) == (form == "the same")
    objects = [chat[0], ChatMessage("assistant", None, call(ARGUMENTS)), chat[2]]
    shown = ChatTemplate(source, {}).render(objects)
    assert "'city'" not in shown and ('{"city": "Lima", "days": [1, null]}' in shown) == (form == "the same")
    for torn in ('{"city":', "", None):
        empty = ChatTemplate(source, {}).render([chat[0], ChatMessage("assistant", None, call(torn)), chat[2]])
        assert empty == ChatTemplate(source, {}).render([chat[0], ChatMessage("assistant", None, call({})), chat[2]])
