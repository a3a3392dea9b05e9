"""Markers are found in a text however it is cut, and no more of it is kept than a marker's begin."""

from __future__ import annotations

import random

import pytest

from tokenloom.ipc.params.call_form import CallForm
from tokenloom.ipc.params.calls_constraint import CallsConstraint, markers_in_text
from tokenloom.ipc.params.text_markers import TextMarkers
from tokenloom.tests.support.today import seeds


@pytest.mark.parametrize("seed", seeds(50, 950))
def test_each_cut_of_a_text_keeps_its_longest_end_that_begins_a_marker(seed: int) -> None:
    rng = random.Random(seed)
    markers = ["".join(rng.choices("aabcé", k=rng.randrange(1, 6))) for _ in range(rng.choice([1, 2, 3]))]
    search, kept, text = TextMarkers(markers), b"", b""
    data = "".join(rng.choices("abcé", k=60)).encode()
    while data:
        count = rng.choice([1, 1, 2, 5, 20])
        found = search.after(kept, data[:count])
        text, data = text + data[:count], data[count:]
        ends = [text.index(each.encode()) + len(each.encode()) for each in markers if each.encode() in text]
        assert search.first_end(text) == min(ends, default=0)
        if ends:
            assert found is None
            return
        assert found is not None
        begins = [each.encode()[:length] for each in markers for length in range(1, len(each.encode()))]
        kept = max((begin for begin in begins if text.endswith(begin)), key=len, default=b"")
        assert found == kept


def constraint(start: str, *others: str, has_text: bool = True) -> str:
    forms = [CallForm(kind="json", start=each, next="", end="") for each in (start, *others)]
    found = CallsConstraint(form=forms[0], others=tuple(forms[1:]), tools={"f": None}, has_text=has_text)
    return found.to_text()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (constraint("\n<tool_call>\n<function="), ("<tool_call>",)),
        (constraint("[CALLS]{NAME}"), ("[CALLS]",)),
        (constraint("call{ID}: "), ("call",)),
        (constraint("<a>", "<b>", "<a> x"), ("<a>", "<b>")),
        (constraint("<|tool|>f"), ("<|tool",)),  # the shorter of a token and a marker: each begins with it
        (constraint("my call:<a>"), ()),  # its white space varies
        (constraint("<a>", "{NAME}"), ()),  # calls begin anywhere
        (constraint("<a>", has_text=False), ()),
    ],
)
def test_the_markers_of_a_constraint_are_those_with_which_its_calls_begin(text: str, expected: tuple[str, ...]) -> None:
    assert markers_in_text(text, {"<|tool", "<b>", "x"}) == expected
