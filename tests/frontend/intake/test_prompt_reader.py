"""The size of a chat is estimated for all values that JSON or a frame of a client can hold."""

from __future__ import annotations

import msgspec
import pytest

from tokenloom.frontend.intake.prompt_reader import TURN_CHARACTERS, characters_of
from tokenloom.ipc.codec import JsonObject
from tokenloom.ipc.messages.client import ChatForm, ChatMessage
from tokenloom.ipc.messages.intake import ReadPrompt


def size_of(more: JsonObject, place: str) -> int:
    """Return the counted size of `more` in a chat."""
    message = ChatMessage("user", "x", more if place == "message" else {})
    form = ChatForm(variables=more if place == "variables" else {})
    return characters_of(ReadPrompt(chat=[message], chat_form=form)) - 1 - TURN_CHARACTERS


@pytest.mark.parametrize("place", ["variables", "message"])
@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**40])
def test_an_integer_above_64_bits_is_counted_with_its_digits(number: int, place: str) -> None:
    assert size_of({"a": [{"b": number}]}, place) == len('{"a":[{"b":}]}') + len(str(number))


@pytest.mark.parametrize("place", ["variables", "message"])
@pytest.mark.parametrize("value", [{None: 1}, {b"key": 1}, {(1, 2): 3}, msgspec.msgpack.Ext(5, b"xx")])
def test_a_value_of_a_frame_that_json_cannot_hold_is_counted(value: object, place: str) -> None:
    assert size_of({"a": value}, place) == len(msgspec.msgpack.encode({"a": value}))
