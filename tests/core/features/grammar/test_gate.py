"""A gate finds the constrained parts of an answer that a slow reading of its tokens finds, however the tokens come."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tokenloom.core.features.grammar.gate import ConstraintGate
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.messages.core import ConstraintBegin
from tokenloom.tests.support.today import seeds


def parts_of(tokens: list[int], begins: dict[tuple[int, ...], bool], length: int) -> list[int]:
    """Return the starts of the constrained parts, each of which ends with its token number `length`: at each place the
    longest begin among the free tokens before it."""
    starts, free_from, place = list[int](), 0, 0
    while place < len(tokens):
        place += 1
        ends = [begin for begin in begins if tuple(tokens[free_from:place][-len(begin) :]) == begin]
        if ends:
            longest = max(ends, key=len)
            starts.append(place - (len(longest) if begins[longest] else 0))
            free_from = place = starts[-1] + length
    return starts


@pytest.mark.parametrize("seed", seeds(40, 960))
def test_parts_start_where_a_slow_reading_finds_them(seed: int) -> None:
    rng = random.Random(seed)
    begins = {
        tuple(rng.choices(range(4), k=rng.choice([1, 2, 2, 3, 5]))): rng.random() < 0.5
        for _ in range(rng.randrange(1, 5))
    }
    tokens = rng.choices(range(rng.choice([4, 6])), k=200)
    length = rng.randrange(max(map(len, begins)), 12)
    expected = parts_of(tokens, begins, length)
    messages = [ConstraintBegin(token_ids=encode_ids(each), is_included=begins[each]) for each in begins]
    outputs = np.array(tokens, np.int32)
    for is_resumed in (False, True):  # tokens one by one, or all at once after each part
        gate, found, index = ConstraintGate(messages), list[int](), 0
        while index < len(tokens):
            known = outputs if is_resumed else outputs[: index + 1]
            if gate.enter(known, index):
                assert gate.start is not None and not gate.is_free
                found.append(gate.start)
                index = gate.start + length
                gate.leave(index)
                assert gate.is_free
            elif is_resumed:
                break
            else:
                assert tokens[index] not in gate.last_ids or gate.is_free
                index += 1
        assert found == expected


@pytest.mark.parametrize("seed", seeds(20, 480))
def test_triggers_count_behind_the_first_begin(seed: int) -> None:
    rng = random.Random(seed)
    tokens, end, triggers = rng.choices(range(9), k=60), rng.choices(range(4), k=2), set(rng.sample(range(9), 2))
    has_end, outputs = rng.random() < 0.7, np.array(tokens, np.int32)
    ends = [place for place in range(2, 61) if tokens[place - 2 : place] == end]
    free_from = ends[0] if has_end and ends else 60 * has_end
    expected = [place for place in range(free_from, 60) if tokens[place] in triggers]
    begins = [ConstraintBegin(token_ids=encode_ids(end))] * has_end
    for is_resumed in (False, True):
        gate, found, index = ConstraintGate(begins, frozenset(triggers)), list[int](), 0
        while index < 60:
            has_entered = gate.enter(outputs if is_resumed else outputs[: index + 1], index)
            if has_entered:
                assert gate.start is not None
                found.append(gate.start)
                index = gate.start
                gate.leave(index + 1)
            elif is_resumed:
                break
            index += 1
        assert found == expected


def test_without_a_begin_the_whole_answer_is_constrained() -> None:
    assert ConstraintGate([]).start == 0


@pytest.mark.parametrize("frame", [b"", b"abc", b"abcdef"])
def test_a_begin_without_whole_tokens_is_no_message(frame: bytes) -> None:
    with pytest.raises(ValueError, match="which make no tokens"):
        ConstraintBegin(token_ids=frame)
