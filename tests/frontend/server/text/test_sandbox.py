"""A template changes lists that it has made, and nothing that it was given; its loops and lists stay bounded."""

from __future__ import annotations

import copy
from datetime import datetime
from typing import Any

import pytest

from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.frontend.server.text.sandbox import MAX_LIST, CompiledTemplate
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import ChatForm, ChatMessage

# Results name the calls of the turn before by a queue of names, as Kimi K2's templates do.
QUEUE = (
    "{% set queue = namespace(ids=[]) %}{% set count = namespace(value=0) %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'tool' %}of {{ queue.ids.pop(0) }}: {% endif %}{{ m.content or '' }}"
    "{% for t in m.tool_calls or [] %}{% set id = 'functions.' ~ t.function.name ~ ':' ~ count.value %}"
    "{% set count.value = count.value + 1 %}{% set _ = queue.ids.append(id) %}[{{ id }}]{% endfor %}{% endfor %}"
)


def calls(*names: str) -> dict[str, Any]:
    return {"tool_calls": [{"id": f"call_{name}", "function": {"name": name, "arguments": "{}"}} for name in names]}


CHAT = [
    ChatMessage("user", "W?"),
    ChatMessage("assistant", None, calls("f", "g")),
    ChatMessage("tool", "1"),
    ChatMessage("tool", "2"),
]
SHOWN = "<user>W?<assistant>[functions.f:0][functions.g:1]<tool>of functions.f:0: 1<tool>of functions.g:1: 2"


def test_a_template_may_keep_a_queue_in_a_list() -> None:
    template = ChatTemplate(QUEUE, {})
    assert template.render(CHAT[:1]) == "<user>W?", "before the first change"
    for _ in range(2):
        assert template.render(CHAT) == SHOWN
    assert ChatTemplate("", {}).render(CHAT, ChatForm(template=QUEUE)) == SHOWN


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ("l.append(3)", "[1, 2, 3]"),
        ("l['append'](3)", "[1, 2, 3]"),
        ("(l | attr('append'))(3)", "[1, 2, 3]"),
        ("l.extend([3, 4])", "[1, 2, 3, 4]"),
        ("l.extend(l)", "[1, 2, 1, 2]"),
        ("l.insert(0, 3)", "[3, 1, 2]"),
        ("l.pop()", "[1]"),
        ("l.pop(0)", "[2]"),
        ("l.remove(1)", "[2]"),
        ("l.reverse()", "[2, 1]"),
        ("l.clear()", "[]"),
    ],
)
def test_each_change_of_a_list_is_made(changes: str, expected: str) -> None:
    assert CompiledTemplate("{% set l = [1, 2] %}{% set _ = " + changes + " %}{{ l }}").render({}) == expected


GIVEN: dict[str, Any] = {"messages": [{"role": "user", "parts": [1]}], "tools": [[2], {"names": ["a"]}], "l": []}


@pytest.mark.parametrize("prefix", ["", "{% set _ = [].append(1) %}"], ids=["at once", "in the second sandbox"])
@pytest.mark.parametrize(
    "change",
    [
        "messages.append(1)",
        "messages['append'](1)",
        "(messages | attr('pop'))()",
        "messages[0].parts.append(1)",
        "messages[0]['parts'].pop()",
        "messages[:][0].parts.clear()",
        "(messages | list)[0].parts.clear()",
        "tools[0].extend([1])",
        "tools[1].names.insert(0, 1)",
        "messages[0].update(role='x')",
        "messages[0].pop('role')",
        "[1].sort()",
        "l.append.func",
    ],
)
def test_what_a_template_was_given_stays_as_it_is(prefix: str, change: str) -> None:
    given = copy.deepcopy(GIVEN)
    template = CompiledTemplate(prefix + "{{ " + change + " }}")
    with pytest.raises(Exception, match=r"unsafe|no attribute"):
        template.render(given)
    assert given == GIVEN


def test_a_copy_of_a_given_list_is_the_templates_own() -> None:
    source = "{% set l = messages[1:] + tools %}{% set _ = l.append(1) %}{{ l }} {{ tools }} {{ tools | tojson }}"
    assert CompiledTemplate(source).render({"messages": [0, 5], "tools": [[6]]}) == "[5, [6], 1] [[6]] [[6]]"


@pytest.mark.parametrize(
    "loop",
    [
        "{% for x in l %}{% set _ = l.append(x) %}{% endfor %}",
        "{% for x in l %}{% set _ = l.insert(0, x) %}{% endfor %}",
        "{% for x in l %}{% set _ = l.extend(l) %}{% endfor %}",
        "{% for x in l | map('string') %}{% set _ = l.append(x) %}{% endfor %}",
        "{{ [missing] | tojson(default=l.append) }}{% for _ in range(20) %}{% set _ = l.extend(l) %}{% endfor %}",
        "{% set _ = l.pop() %}{% set _ = l.append(missing) %}{{ l | tojson(default=l.append) }}",
    ],
)
def test_a_loop_that_adds_to_its_own_list_ends(loop: str) -> None:
    with pytest.raises(RequestError, match=f"more than {MAX_LIST} items"):
        ChatTemplate("{% set l = [1] %}" + loop, {}).render(CHAT)


def test_a_list_that_holds_itself_is_an_error_at_most() -> None:
    start = "{% set l = [1] %}{% set _ = l.append(l) %}"
    assert ChatTemplate(start + "{{ l }}", {}).render(CHAT) == "[1, [...]]"
    for show in ("{{ l | tojson }}", "{{ l | tojson(check_circular=false) }}", "{{ l == [1, l, 2][:2] }}"):
        with pytest.raises(RequestError, match="the chat template"):
            ChatTemplate(start + show + "{{ 1 / 0 }}", {}).render(CHAT)


def test_a_template_without_changes_of_lists_stays_in_the_immutable_sandbox() -> None:
    given: list[object] = []
    template = CompiledTemplate("{{ seen(messages) }}{% if change %}{% set _ = [].append(1) %}{% endif %}")
    seen = {"seen": lambda messages: given.append(messages), "messages": [1]}
    for change in (False, False, True, False):
        template.render({**seen, "change": change})
    assert [each is seen["messages"] for each in given] == [True, True, True, False, False]


def test_a_template_sees_the_time_that_is_given_however_late_it_is_rendered() -> None:
    in_macro = "{% macro day() %}{{ strftime_now('%d') }}{% endmacro %}{{ day() }}"
    template = ChatTemplate("{{ strftime_now('%s') }} " + in_macro, {})
    noon = datetime(2026, 3, 9, 12).timestamp()
    assert template.render(CHAT, now=noon) == f"{noon:.0f} 09"
    assert template.render(CHAT, ChatForm(variables={"strftime_now": str.upper}), noon) == "%S %D", "the caller's own"


def test_what_a_filter_gives_is_written_as_a_list() -> None:
    template = ChatTemplate("{{ messages | map(attribute='role') | tojson }}", {})
    assert template.render(CHAT[:1]) == '["user"]'
    with pytest.raises(RequestError, match="not JSON serializable"):
        ChatTemplate("{{ messages | map(attribute='no_field') | tojson }}", {}).render(CHAT[:1])
