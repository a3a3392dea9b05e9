"""Ids of answers: which parts a caller chooses, and which nobody can guess."""

from __future__ import annotations

import re

import pytest

from tokenloom.frontend.forms.openai.prompts import answer_id, response_id, submitted_id
from tokenloom.frontend.server.api.continuation import new_continuation


@pytest.mark.parametrize("given", [None, "mine", "a_b", "0" * 32, "x_" + "0" * 32])
def test_a_response_has_a_secret_of_128_bits_that_no_other_id_shows(given: str | None) -> None:
    continuation = new_continuation()
    chat_id = answer_id("chatcmpl", given, continuation.digits("id"))
    shown = response_id(chat_id, continuation.digits("secret"))
    name, _, secret = shown.rpartition("_")
    assert name == "resp_" + chat_id.removeprefix("chatcmpl-") and re.fullmatch("[0-9a-f]{32}", secret)
    assert secret not in chat_id and secret != new_continuation().digits("secret")
    assert submitted_id(shown) == chat_id, "it can be aborted by its id"


def test_an_answer_is_aborted_by_any_of_its_ids() -> None:
    assert submitted_id("resp_mine") == submitted_id("msg_mine") == "chatcmpl-mine"
    assert submitted_id("msg_x_" + "0" * 32) == "chatcmpl-x_" + "0" * 32
    for each in ("cmpl-mine", "chatcmpl-mine", "mine", "respmine", ""):
        assert submitted_id(each) == each
