"""The calls of an answer have ids of their own, though the model repeats one."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenloom.frontend.forms.answer_forms.form import AnswerForm
from tokenloom.frontend.forms.openai.text import AnswerStyle, AnswerText
from tokenloom.frontend.forms.parsers.parts import CallBegin, CallEnd, Content, Parser, Part
from tokenloom.ipc.messages.client import Delta

PLAIN: dict[str, Any] = dict.fromkeys(AnswerStyle.__struct_fields__)


class Lines:
    """Parser of calls, an id in each line."""

    markers = ()

    def append(self, text: str) -> list[Part]:
        return [part for call_id in text.split() for part in (CallBegin("f", call_id), CallEnd(""))]

    def finish(self) -> list[Part]:
        return []


class LinesStyle(AnswerStyle, frozen=True, kw_only=True):
    def new_parsers(self) -> list[Parser]:
        return [Lines()]


def test_an_id_that_the_model_repeats_is_replaced() -> None:
    style = LinesStyle(**PLAIN | {"custom_names": frozenset(), "form": AnswerForm()})
    text, found = AnswerText(style), list[str]()
    for written in ("a\nb\n", "a\nc\nb"):
        parts = text.read(msgspec.structs.replace(Delta(request_id="x", index=0), text=written))
        assert not any(isinstance(part, Content) for part in parts)
        found += [part.id for part in parts if isinstance(part, CallBegin)]
    assert [found[0], found[1], found[3]] == ["a", "b", "c"]
    assert len(set(found)) == 5 and all(each.startswith("call_") for each in (found[2], found[4]))
