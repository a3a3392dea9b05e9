"""Chats of agents, with several system messages, in templates that take one, none, or only at the beginning."""

from __future__ import annotations

import pytest

from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.frontend.server.text.system_turns import other_forms
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import ChatMessage, MediaPart, TextPart

SHOWN = "[{{ m.role }}] {{ m.content }}\n"
PLAIN = "{% for m in messages %}" + SHOWN + "{% endfor %}"
ALTERNATING = """{%- if messages[0].role == 'system' %}{{ '[system] ' + messages[0].content + '\n' }}
{%- set messages = messages[1:] %}{% endif %}
{%- for m in messages %}
{%- if m.role != ['user', 'assistant'][loop.index0 % 2] %}{{ raise_exception('turns must alternate') }}{% endif %}
{{- '[' + m.role + '] ' + m.content + '\n' }}
{%- endfor %}"""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + ALTERNATING
SILENT = "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + SHOWN + "{% endif %}{% endfor %}"
AGENTS = [
    ChatMessage("system", "You code."),
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "cwd: /"),
    ChatMessage("user", "Fix it."),
    ChatMessage("assistant", "Done."),
    ChatMessage("system", "Date: today."),
    ChatMessage("user", "Thanks."),
]
ONE_SYSTEM = (
    "[system] You code.\n\nBe brief.\n[user] cwd: /\n\nFix it.\n[assistant] Done.\n[user] Date: today.\n\nThanks.\n"
)


def render(template: str, *messages: ChatMessage) -> str:
    return ChatTemplate(template, {}).render(messages)


def test_a_template_that_shows_every_turn_gets_the_chat_as_it_is() -> None:
    assert render(PLAIN, *AGENTS) == "".join(f"[{each.role}] {each.text}\n" for each in AGENTS)


@pytest.mark.parametrize("template", [ALTERNATING, SILENT])
def test_a_template_that_refuses_or_hides_a_system_message_gets_one_at_the_beginning(template: str) -> None:
    assert render(template, *AGENTS) == ONE_SYSTEM


def test_a_template_without_system_messages_gets_their_text_before_that_of_the_user() -> None:
    without = ONE_SYSTEM.replace("[system] ", "[user] ", 1).replace("Be brief.\n[user] ", "Be brief.\n\n")
    assert render(NO_SYSTEM, *AGENTS) == without
    assert render(NO_SYSTEM, *AGENTS[1:3]) == "[user] Be brief.\n\ncwd: /\n"


def test_a_chat_that_no_form_mends_is_refused_with_the_first_reason() -> None:
    refusing = "{{ raise_exception(messages | length) }}"
    with pytest.raises(RequestError, match="refuses these messages: 7"):
        render(refusing, *AGENTS)
    with pytest.raises(RequestError, match="turns must alternate"):
        render(ALTERNATING, ChatMessage("assistant", "x"), ChatMessage("assistant", "y"))


def test_media_keep_their_order_and_calls_their_fields() -> None:
    image = ChatMessage("user", [MediaPart(0), TextPart("this?")])
    calls = ChatMessage("assistant", None, {"tool_calls": []})
    (form, bare) = other_forms([AGENTS[0], AGENTS[2], image, calls])
    assert form[1].parts == [TextPart("cwd: /"), TextPart("\n\n"), MediaPart(0), TextPart("this?")]
    assert form[2] is calls and bare[0].parts[0] == TextPart("You code.") and len(bare) == 2


def test_a_chat_whose_turns_alternate_has_no_other_form() -> None:
    assert not list(other_forms([AGENTS[2], AGENTS[4], AGENTS[6]]))
    assert len(list(other_forms(AGENTS[1:3]))) == 1
