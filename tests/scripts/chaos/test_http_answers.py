"""Digests of answers do not depend on the division into events, and on nothing else that time changes."""

from __future__ import annotations

import pytest

from tokenloom.scripts.chaos.http_answers import Event, digest


def chunk(text: str, index: int = 0, reason: str | None = None, **fields: object) -> Event:
    return {"id": "x", "choices": [{"index": index, "delta": {"content": text}, "finish_reason": reason}], **fields}


def test_merged_deltas_and_other_ids_and_times_are_the_same_answer() -> None:
    one = [chunk("ab", 1), chunk("cd", 0, created=5), chunk("", 0, "stop", usage={"completion_tokens": 2})]
    other = [chunk("c"), chunk("a", 1), chunk("b", 1), chunk("d", 0, "stop", created=9, usage={"completion_tokens": 2})]
    assert digest(one) == digest(other)


@pytest.mark.parametrize("changed", [chunk("ad"), chunk("ab", 1), chunk("ab", 0, "stop"), chunk("ab", usage={"n": 1})])
def test_another_text_choice_reason_or_usage_is_another_answer(changed: Event) -> None:
    assert digest([chunk("ab")]) != digest([changed])


def test_a_gap_in_the_sequence_numbers_is_an_error() -> None:
    with pytest.raises(ConnectionError, match="gap"):
        digest([{"type": "a", "sequence_number": 0}, {"type": "b", "sequence_number": 2}])
