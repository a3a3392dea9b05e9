"""Ids of answers: which parts a caller chooses, and which nobody can guess."""

from __future__ import annotations

import re

import pytest

from tokenloom.frontend.forms.openai.prompts import answer_id, new_response_id, submitted_id


@pytest.mark.parametrize("given", [None, "mine", "a_b", "0" * 32, "x_" + "0" * 32])
def test_a_response_has_a_secret_of_128_bits_that_no_other_id_shows(given: str | None) -> None:
    chat_id = answer_id("chatcmpl", given)
    first, second = new_response_id(chat_id), new_response_id(chat_id)
    assert first != second
    for each in (first, second):
        name, _, secret = each.rpartition("_")
        assert name == "resp_" + chat_id.removeprefix("chatcmpl-") and re.fullmatch("[0-9a-f]{32}", secret)
        assert submitted_id(each) == chat_id, "it can be aborted by its id"


def test_an_answer_is_aborted_by_any_of_its_ids() -> None:
    assert submitted_id("resp_mine") == submitted_id("msg_mine") == "chatcmpl-mine"
    assert submitted_id("msg_x_" + "0" * 32) == "chatcmpl-x_" + "0" * 32
    for each in ("cmpl-mine", "chatcmpl-mine", "mine", "respmine", ""):
        assert submitted_id(each) == each
