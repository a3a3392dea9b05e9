"""White space that the template writes is dropped as far as it is there; all other white space stays."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.frontend.forms.answer_forms.form import AnswerForm, Spaces
from tokenloom.frontend.forms.answer_forms.named import HERMES
from tokenloom.frontend.forms.parsers.machine import AnswerMachine
from tokenloom.frontend.forms.parsers.parts import Content, Part
from tokenloom.tests.frontend.forms.parsers.cuts import CALL, PLACES, check_cuts, joined, parts_of

SPACES = Spaces(
    thought_open="\n", prompted_thought="", thought_close="\n", behind_thought="\n\n", content=" ", calls="\n\n"
)
FORM = AnswerForm(thought=("<think>", "</think>"), calls=(HERMES,), spaces=SPACES)


def read(text: str, form: AnswerForm = FORM, *, is_inside: bool = False) -> list[str]:
    """Return the thoughts and contents of an answer, and C for each call."""
    machine = AnswerMachine(form, {}, is_inside_thought=is_inside)
    found = joined(parts_of(machine, [*text]))
    return ["C" if kind == "CallBegin" else said for kind, said in found if kind in ("Thought", "Content", "CallBegin")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"I look.\n\n{CALL}", ["I look.", "C"]),
        (f"I look.\n{CALL}", ["I look.", "C"]),
        (f"I look. \n \n\n{CALL}", ["I look. \n ", "C"]),
        (f"I look. {CALL}", ["I look. ", "C"]),
        (f" I look.{CALL}\n\nDone.\n\n", ["I look.", "C", "\n\nDone.\n\n"]),
        (f"  I look.{CALL}", [" I look.", "C"]),
        (f" \n{CALL} \n", ["C"]),
        (" \n", ["\n"]),
        (" \n<tool_call> \n", ["\n<tool_call> \n"]),
        ("<think>\nHm.\n</think>\n\nSo.", ["Hm.", "So."]),
        ("<think>Hm.</think>So.", ["Hm.", "So."]),
        ("<think>\n\n Hm.\n\n</think>\n\n\n So.\n", ["\n Hm.\n", "\n So.\n"]),
        (f"<think>\n\n</think>\n\n{CALL}", ["C"]),
        ("<think>\nHm.\n", ["Hm."]),
    ],
)
def test_only_the_white_space_of_the_template_is_dropped(text: str, expected: list[str]) -> None:
    assert read(text) == expected


def test_a_thought_that_the_prompt_opens_keeps_white_space_that_the_prompt_has_written() -> None:
    assert read("\nHm.\n</think>\n\nSo.", is_inside=True) == ["\nHm.", "So."]


def test_an_answer_that_continues_a_text_keeps_white_space_at_its_begin() -> None:
    assert read(f" I look.\n\n{CALL}", FORM.continued()) == [" I look.", "C"]
    spaces = msgspec.structs.replace(SPACES, prompted_thought="\n")
    form = msgspec.structs.replace(FORM, spaces=spaces)
    assert read("\nHm.\n</think>", form, is_inside=True) == ["Hm."]
    assert read("\nHm.\n</think>", form.continued(), is_inside=True) == ["\nHm."]


def test_text_is_returned_as_it_comes_but_for_white_space_that_may_be_dropped() -> None:
    machine = AnswerMachine(FORM, {})
    pieces: list[list[Part]] = [machine.append(each) for each in ("I", " look.", " \n\n", "\n", "So")]
    assert pieces == [[Content("I")], [Content(" look.")], [Content(" ")], [Content("\n")], [Content("\n\nSo")]]


PIECES = st.sampled_from(["<think>", "</think>", CALL, "\n", "\n\n", " ", "So.", "<tool_call>"])


@given(st.lists(PIECES, max_size=8), PLACES, st.booleans())
def test_cuts_change_nothing(pieces: list[str], places: list[int], is_inside: bool) -> None:
    check_cuts(lambda: AnswerMachine(FORM, {}, is_inside_thought=is_inside), "".join(pieces), places)
