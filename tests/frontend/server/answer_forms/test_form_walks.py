"""Random answers under the constraints of a learned form are calls to three readers: the form's parsers, jsonschema and
the template itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tokenloom.frontend.server.answer_forms.choose import choose
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.ipc.codec import JsonObject
from tokenloom.ipc.messages.client import ChatForm, ChatMessage
from tokenloom.tests.support.form_walks import MODES, FormWalks, Mode
from tokenloom.tests.support.template_shapes import FOLDER, SHAPES

NAMES = [name for name, shape in SHAPES.items() if shape.kind and not shape.has_minor]
SHORT = ("object/indented_ids", "json/place_in_name", "tagged/lines_and_thoughts", "literal/quoted_by_marker")
NUM_ANSWERS = 4  # of a template and a mode
MANY = 25  # 1,000 of each kind


def check(name: str, mode: Mode, count: int, folder: Path) -> None:
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})

    def render(messages: Sequence[ChatMessage], variables: JsonObject) -> str:
        return template.render(messages, ChatForm(variables=variables))

    answers = list(FormWalks(folder, choose(render, source).form, render).answers(mode, count, seed=1))
    assert [answer for answer in answers if answer.fault or answer.difference] == []
    assert sum(answer.num_calls for answer in answers) > count // 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SHORT)
def test_random_answers_are_calls_to_all_readers(name: str, mode: Mode, tmp_path: Path) -> None:
    check(name, mode, NUM_ANSWERS, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_no_answer_of_a_thousand_is_invalid(name: str, mode: Mode, tmp_path: Path) -> None:
    check(name, mode, MANY, tmp_path)
