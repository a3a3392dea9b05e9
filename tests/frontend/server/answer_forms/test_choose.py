"""The first form that returns all probes is chosen; the operator's is taken anyway."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from tests.support.template_shapes import SHAPES, template_of
from tokenloom.frontend.server.answer_forms import choose as chooser
from tokenloom.frontend.server.answer_forms.choose import Choice, choose
from tokenloom.frontend.server.answer_forms.probe import MINOR, PROBES
from tokenloom.frontend.server.answer_forms.shown_form import difference_line, form_line, form_object, history_line
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.ipc.codec import JsonObject
from tokenloom.ipc.messages.client import ChatForm, ChatMessage

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
LEARNED = [name for name, shape in SHAPES.items() if shape.kind]


def choice_of(source: str, tool_parser: str = "auto", reasoning_parser: str = "auto") -> Choice:
    template = ChatTemplate(source, SPECIAL_TOKENS)

    def render(messages: Sequence[ChatMessage], variables: JsonObject) -> str:
        return template.render(messages, ChatForm(variables=variables))

    return choose(render, source, tool_parser=tool_parser, reasoning_parser=reasoning_parser)


@pytest.mark.parametrize("name", LEARNED)
def test_learned_form_returns_what_went_in(name: str) -> None:
    choice = choice_of(template_of(name))
    assert choice.origin == "learned"
    assert {each.probe for each in choice.different} <= MINOR, choice.different
    assert choice.num_returned >= 4


def test_form_of_one_template_does_not_return_probes_of_another() -> None:
    choice = choice_of(template_of("tagged/lines"), tool_parser="hermes")
    assert choice.origin == "named"
    assert choice.form.name == "hermes"
    assert choice.different
    assert "--tool-call-parser hermes" in difference_line(choice)


def test_named_form_that_returns_all_gives_no_warning() -> None:
    choice = choice_of(template_of("object/hermes"), tool_parser="hermes")
    assert choice.num_returned == choice.num_shown > 0
    assert difference_line(choice) == ""


def test_bare_objects_are_read_by_the_named_form() -> None:
    choice = choice_of(template_of("odd/bare_object"))
    assert (choice.origin, choice.form.name) == ("tried", "llama")


def test_channels_are_read_by_their_own_reader() -> None:
    assert choice_of(template_of("odd/channels")).form.reader == "harmony"


def test_line_says_what_is_unknown_and_how_to_mend_it() -> None:
    choice = choice_of(template_of("odd/recipient_in_prompt"))
    assert choice.origin == "unknown"
    assert not choice.form.calls
    line = form_line(choice)
    assert line.startswith("calls: form unknown (")
    assert "--tool-call-parser" in line


def test_line_names_kind_thoughts_and_probes() -> None:
    line = form_line(choice_of(template_of("object/hermes_thoughts")))
    assert line == (
        "calls: learned from the chat template (JSON objects, several at a time), thoughts: <think>…</think>; "
        f"{len(PROBES)} of {len(PROBES)} probes returned"
    )


def test_minor_difference_stands_in_the_line_and_in_the_object() -> None:
    choice = choice_of(template_of("odd/elements_by_name"))
    assert choice.origin == "learned"
    assert form_line(choice).endswith("not returned: nested values")
    assert form_object(choice)["first_difference"]["probe"] == "nested values"


def test_line_and_object_name_the_answer_that_the_next_prompt_shows_otherwise() -> None:
    choice = choice_of(template_of("object/hermes_thoughts"))
    line = history_line(choice)
    assert line.startswith("history: thought and text: the next turn's prompt differs from what was generated at: ")
    assert line.endswith(", so its KV blocks are computed again")
    assert form_object(choice)["history_difference"]["answer"] == "thought and text"
    assert msgspec.json.decode(msgspec.json.encode(choice), type=chooser.Choice) == choice


def test_no_line_if_the_next_prompt_begins_with_each_answer() -> None:
    choice = choice_of(template_of("object/hermes"))
    assert history_line(choice) == ""
    assert "history_difference" not in form_object(choice)


def test_template_that_never_ends_a_second_turn_has_no_form() -> None:
    source = "{{ messages[0].content }}{% for a in range(2000) if messages|length > 2 %}{{ 'x' * 1000 }}{% endfor %}"
    choice = choice_of(source)
    assert choice.origin == "unknown"
    assert "characters" in choice.why


def test_sign_decides_where_no_calls_are_shown() -> None:
    source = "{% for m in messages %}{{ m.content }};{% endfor %}{# tools: <tool_call> #}"
    choice = choice_of(source)
    assert (choice.origin, choice.form.name) == ("sign", "hermes")


def test_template_without_end_has_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% for a in range(2000) %}{{ 'x' * 1000 }}{% endfor %}{{ messages[0].content }}"
    choice = choice_of(source)
    assert choice.origin == "unknown"
    assert "characters" in choice.why
    assert choice_of(source, tool_parser="hermes").form.name == "hermes"


def test_operators_thoughts_are_those_of_the_form() -> None:
    choice = choice_of(template_of("object/hermes"), reasoning_parser="granite")
    assert choice.form.thought == ("Here is my thought process:", "Here is my response:")
    assert choice_of(template_of("object/hermes_thoughts"), reasoning_parser="none").form.thought is None


def test_choice_survives_json() -> None:
    choice = choice_of(template_of("tagged/typed"))
    assert msgspec.json.decode(msgspec.json.encode(choice), type=chooser.Choice) == choice
