"""Jump-forward tokens are the tokens that one mask after the other would leave, and the masks after them are equal."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from tokenloom.core.features.grammar.compiler import Matcher, Words
from tokenloom.core.features.grammar.cursor import AHEAD_S, MAX_AHEAD, GrammarCursor
from tokenloom.tests.core.features.grammar.matching import COMPILER, VOCAB_SIZE, allowed, ids_of

SCHEMA = {
    "type": "object",
    "properties": {
        "a long name": {
            "enum": ["left", "right", "a text that goes on for more than sixty-four tokens: " + "xq " * 60]
        },
        "b": {"type": "array", "items": {"const": [1, {"c": None}]}, "minItems": 2, "maxItems": 5},
        "d": {"type": "string", "maxLength": 4},
    },
    "required": ["a long name", "b", "d"],
    "additionalProperties": False,
}


def first_mask(answer: GrammarCursor) -> Words:
    words = np.zeros(COMPILER.num_words, np.uint32)
    if answer.unmasked is not None:
        answer.unmasked.fill(words)
    return words


def told_mask(answer: GrammarCursor) -> list[int]:
    words = first_mask(answer)
    answer.finish_mask(words)
    return ids_of(words)


@pytest.mark.parametrize("seed", range(6))
def test_looking_ahead_makes_the_masks_of_a_plain_matcher(seed: int) -> None:
    rng, text = random.Random(seed), json.dumps(SCHEMA)
    plain, answer = COMPILER.compile("json", text), GrammarCursor(COMPILER.compile("json", text), VOCAB_SIZE)
    forced, num_forced, num_single = list[int](), 0, 0
    while not plain.is_complete:
        expected = allowed(plain)
        if rng.random() < 0.7 or not answer.ahead:  # a token that is known need not be asked for
            assert told_mask(answer) == expected
            assert (len(expected) == 1) == bool(answer.ahead)
            forced = list(answer.ahead)
        token_id = rng.choice(expected)
        if forced:
            assert token_id == forced.pop(0)
            num_forced += 1
        plain.consume([token_id])
        answer.take(token_id)
        num_single += len(expected) == 1
        assert answer.error is None and answer.has_stopped == plain.is_complete
    assert num_forced == num_single > 20


@pytest.mark.parametrize("seed", range(6))
def test_masks_after_drafts_are_those_of_a_plain_matcher_and_end_at_a_forbidden_one(seed: int) -> None:
    rng, text = random.Random(seed), json.dumps(SCHEMA)
    plain, answer = COMPILER.compile("json", text), GrammarCursor(COMPILER.compile("json", text), VOCAB_SIZE)
    num_masks = num_broken = num_ended = 0
    while not plain.is_complete:
        words = first_mask(answer)
        if np.count_nonzero(words) <= 1:
            answer.finish_mask(words)
        drafts, expected, walker = list[int](), list[list[int]](), plain.copy()
        for _ in range(rng.randrange(1, 12)):
            drafts.append(rng.choice(allowed(walker)))
            walker.consume(drafts[-1:])
            if walker.has_stopped:
                num_ended += 1
                break
            expected.append(allowed(walker))
        if not walker.has_stopped and rng.random() < 0.5:
            forbidden = set(range(VOCAB_SIZE)) - set(expected[-1])
            drafts += [rng.choice(sorted(forbidden)), 5]
            num_broken += 1
        assert [ids_of(mask) for mask in answer.draft_masks(words, drafts)] == expected
        num_masks += len(expected)
        answer.take(drafts[0])
        plain.consume(drafts[:1])
    assert num_masks > 50 and num_broken and num_ended


@pytest.mark.parametrize(("seconds", "num_ahead"), [(AHEAD_S / 1000, MAX_AHEAD), (AHEAD_S * 0.9, 2), (AHEAD_S * 2, 1)])
def test_a_look_ahead_ends_after_its_time_and_goes_on_with_the_next_mask(seconds: float, num_ahead: int) -> None:
    now = [0.0]

    class SlowMatcher(Matcher):
        def fill(self, words: Words) -> None:
            now[0] += seconds
            super().fill(words)

    choices = json.dumps(["xq" * 300])
    plain = COMPILER.compile("choice", choices)
    matcher = SlowMatcher(COMPILER.compile("choice", choices).inner)
    answer = GrammarCursor(matcher, VOCAB_SIZE, lambda: now[0])
    for _ in range(700):
        expected = allowed(plain)
        assert told_mask(answer) == expected and 1 <= len(answer.ahead) <= num_ahead
        for token_id in list(answer.ahead):
            answer.take(token_id)
            plain.consume([token_id])
        if plain.is_complete:
            break
    assert plain.is_complete and answer.has_stopped
