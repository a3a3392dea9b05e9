"""Calls and results have ids that belong together and that the template takes, the same in each turn."""

from __future__ import annotations

import string
from typing import Any

import pytest

from tests.support.template_shapes import template_of
from tokenloom.frontend.server.text.calls import NUM_CHARACTERS, short_id, with_ids
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.ipc.messages.client import ChatMessage

ONE, TWO = "call00001", "call00002"
OURS, KIMIS, OF_CLAUDE = "call_0123456789abcdef01234567", "functions.get:0", "toolu_01A09q90qw90lq917835lq9"


def call(call_id: str | None, name: str = "get") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"a": 1}}}


def said(*calls: object) -> ChatMessage:
    return ChatMessage("assistant", None, {"tool_calls": list(calls)})


def result(call_id: str | None = None, name: str | None = None) -> ChatMessage:
    given = {"tool_call_id": call_id, "name": name}
    return ChatMessage("tool", "20", {key: value for key, value in given.items() if value is not None})


def ids(messages: Any) -> list[object]:
    """Return the ids of calls and results in order."""
    found: list[object] = []
    for each in messages:
        found += [one["id"] for one in each.more.get("tool_calls", ())]
        found += [each.more.get("tool_call_id")] * (each.role == "tool")
    return found


def test_a_chat_with_ids_stays_as_it_is() -> None:
    messages = [ChatMessage("user", "W?"), said(call("a")), result("a"), ChatMessage("assistant", "20.")]
    assert with_ids(messages) is messages


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([said(call(None), call(None)), result(), result()], [ONE, TWO, ONE, TWO]),
        ([said(call("x"), call("y")), result("y"), result()], ["x", "y", "y", "x"]),
        ([said(call(""), call(None, "find")), result(name="find"), result()], [ONE, TWO, TWO, ONE]),
        ([said(call("x")), result(name="another")], ["x", "x"]),
        ([said(call(None)), result(), said(call(None)), result()], [ONE, ONE, TWO, TWO]),
        ([result(), said(call("x"))], [None, "x"]),
        ([said(call("x")), result(), result()], ["x", "x", None]),
    ],
)
def test_a_result_without_an_id_gets_that_of_its_call(messages: list[ChatMessage], expected: list[object]) -> None:
    assert ids(with_ids(messages)) == expected


def test_calls_of_another_form_stay_as_they_are() -> None:
    odd: list[object] = [5, {"function": 5}, {}]
    (message,) = with_ids([said(*odd)])
    assert message.more["tool_calls"] == [5, {"function": 5, "id": "call00002"}, {"id": "call00003"}]


def test_ids_of_many_calls_are_found_in_linear_time() -> None:
    count = 20_000
    messages = [said(*(call(None, f"f{number % 3}") for number in range(count)))]
    messages += [result(name=f"f{number % 3}") for number in reversed(range(count))]
    found = ids(with_ids(messages))
    assert len(set(found)) == count and sorted(map(str, found[:count])) == sorted(map(str, found[count:]))


@pytest.mark.parametrize("given", [OURS, KIMIS, OF_CLAUDE, "", "é", "\ud800", "abcdefgh\n", "日" * 9, "1234-6789"])
def test_another_id_becomes_nine_letters_and_digits_always_the_same(given: str) -> None:
    derived = short_id(given)
    assert len(derived) == NUM_CHARACTERS and set(derived) <= set(string.ascii_letters + string.digits)
    assert derived == short_id(given) == short_id(derived)
    assert derived != short_id(given + "0")


def test_an_id_of_nine_letters_and_digits_stays() -> None:
    assert short_id("a1B2c3D4e") == "a1B2c3D4e"


@pytest.mark.parametrize("name", ["json/marker_and_id", "object/call_ids"])
@pytest.mark.parametrize("given", [OURS, KIMIS, OF_CLAUDE, None, "a1B2c3D4e"])
def test_a_template_that_wants_nine_characters_takes_calls_of_any_conversation(name: str, given: str | None) -> None:
    template = ChatTemplate(template_of(name), {"bos_token": "<s>", "eos_token": "</s>"})
    chat = [ChatMessage("user", "W?"), said(call(given)), result(given)]
    written = short_id(given or "call00001")
    text = template.render(chat)
    assert text.count(written) == 2, "the call's, and the result's"
    assert template.render([*chat, ChatMessage("assistant", "20."), ChatMessage("user", "And?")]).startswith(text)
    assert template.render([chat[0], chat[2]]), "a result alone"


def test_other_templates_get_the_id_that_was_sent() -> None:
    template = ChatTemplate(template_of("json/headers_between"), {})
    for given in (OURS, KIMIS):
        assert f"<|tool_call:begin|>{given}<" in template.render(
            [ChatMessage("user", "W?"), said(call(given)), result(given)]
        )
