"""NamePattern matches as Python's `re`, as PEFT uses it, in bounded time."""

from __future__ import annotations

import random
import re
import time

import pytest

from tokenloom.ipc.spec.adapters.name_pattern import Name, NamePattern, PatternError, StepBudget
from tokenloom.ipc.spec.adapters.pattern_table import PatternTable

ATOMS = ["a", "b", r"\.", ".", "[ab]", "[^a]", "0", r"\d", r"\w", "x", "[a-c]", "[^a-b.]", "[]a]", r"[a\-b]", r"\W"]
COUNTS = ["*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "{x"]


def matches(pattern: str, name: str) -> bool:
    return NamePattern(pattern).matches(Name(name, StepBudget()))


def random_pattern(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.4:
        return rng.choice(ATOMS)
    inner = random_pattern(rng, depth - 1)
    if kind < 0.6:
        return inner + random_pattern(rng, depth - 1)
    if kind < 0.7:
        return f"({inner}|{random_pattern(rng, depth - 1)})"
    if kind < 0.9:
        return f"(?:{inner}){rng.choice(COUNTS)}"
    return f"{rng.choice(['^', ''])}{inner}{rng.choice(['$', ''])}"


def test_random_patterns_match_as_re() -> None:
    rng, num_matches = random.Random(3), 0
    for _ in range(1200):
        pattern = random_pattern(rng, 3)
        compiled = re.compile(rf"(.*\.)?({pattern})$")
        for _ in range(5):
            name = "".join(rng.choice("ab.0x1c") for _ in range(rng.randint(0, 8)))
            assert matches(pattern, name) == bool(compiled.match(name)), (pattern, name)
            num_matches += bool(compiled.match(name))
    assert num_matches > 300


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(a|a)*b", "((a?){40}){40}b", "(((((a*)*)*)*)*)*b", "(.*.*.*.*.*.*.*.*)b", "(a{2,}){9,}b"]
)
def test_patterns_that_hold_re_for_hours_are_fast(pattern: str) -> None:
    start = time.process_time()
    assert not matches(pattern, "a" * 200)
    assert time.process_time() - start < 0.5


def test_steps_of_all_names_are_bounded() -> None:
    table = PatternTable({"(.?a?){500}(b|c|d)*x": 1}, StepBudget(1000))
    table.find("a." * 100)
    with pytest.raises(PatternError, match="more than 1000 steps"):
        for _ in range(1000):
            table.find("a." * 100)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a", "a group is not closed"),
        ("a)", r"unexpected '\)'"),
        ("*a", "nothing to repeat"),
        ("a**", "behind"),
        ("a++", "behind"),
        ("[a", "ends too early"),
        ("a\\", "ends too early"),
        ("[b-a]", "invalid range"),
        ("a{3,2}", "no range"),
        ("(?=a)", "not supported"),
        ("(?P<n>a)", "not supported"),
        (r"(a)\1", "not supported"),
        (r"\ba", "not supported"),
        ("a" * 501, "501 characters"),
        ("(" * 50 + "a" + ")" * 50, "nests more"),
    ],
)
def test_other_patterns_are_refused_with_a_reason(pattern: str, reason: str) -> None:
    with pytest.raises(PatternError, match=reason):
        NamePattern(pattern)


def test_first_key_that_matches_counts() -> None:
    table = PatternTable({"layers.0.q_proj": 1, r".*q_proj": 2, "q_proj": 3, "k_proj": 4}, StepBudget())
    paths = ("model.layers.0.q_proj", "model.layers.1.q_proj", "model.layers.0.k_proj", "model.layers.0.v_proj")
    assert [table.find(path) for path in paths] == [1, 2, 4, None]


def test_number_of_regular_expressions_is_bounded() -> None:
    PatternTable({f"layers.{layer}.q_proj": 1 for layer in range(5000)}, StepBudget())
    with pytest.raises(PatternError, match="101 of its keys are regular expressions, at most 100 may be"):
        PatternTable({f"layers.{layer}.(q|k)_proj": 1 for layer in range(101)}, StepBudget())
