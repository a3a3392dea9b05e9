"""NamePattern matches as Python's `re`, as PEFT uses it, in bounded time, or is refused."""

from __future__ import annotations

import random
import re
import sys
import time
import warnings

import pytest

from tokenloom.ipc.spec.adapters.name_pattern import NamePattern, PatternError, StepBudget
from tokenloom.ipc.spec.adapters.pattern_table import PatternTable

ATOMS = [
    "a",
    "b",
    r"\.",
    ".",
    "[ab]",
    "[^a]",
    "0",
    r"\d",
    r"\w",
    "x",
    "[a-c]",
    "[^a-b.]",
    "[]a]",
    r"[a\-b]",
    r"\W",
    "[[:alpha:]x]",
    "[][:alpha:]]",
    r"\x61",
]
COUNTS = ["*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "{x"]


def matches(pattern: str, name: str) -> bool:
    return NamePattern(pattern).matches(name, StepBudget())


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


def is_refused(pattern: str) -> bool:
    try:
        NamePattern(pattern)
    except PatternError:
        return True
    return False


def test_random_patterns_match_as_re_or_are_refused() -> None:
    rng, num_matches, num_refused = random.Random(3), 0, 0
    for _ in range(1200):
        pattern = random_pattern(rng, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of `[[`
            compiled = re.compile(rf"(.*\.)?({pattern})$")
        if is_refused(pattern):
            num_refused += 1
            assert any(each in pattern for each in ("{,", "[[", "[][", r"\x")), pattern
            continue
        for _ in range(5):
            name = "".join(rng.choice("ab.0x1c") for _ in range(rng.randint(0, 8)))
            assert matches(pattern, name) == bool(compiled.match(name)), (pattern, name)
            num_matches += bool(compiled.match(name))
    assert num_matches > 300 and 0 < num_refused < 600


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(a|a)*b", "((a?){30}){30}b", "(((((a*)*)*)*)*)*b", "(.*.*.*.*.*.*.*.*)b", "(a{2,}){9,}b"]
)
def test_patterns_that_hold_re_for_hours_are_fast(pattern: str) -> None:
    start = time.process_time()
    assert not matches(pattern, "a" * 200)
    assert time.process_time() - start < 0.5


def test_steps_of_all_names_are_bounded() -> None:
    budget = StepBudget(1_000_000)
    pattern, name = NamePattern("(.?a?){300}(b|c|d)*x"), "a." * 100
    with pytest.raises(PatternError, match="more than 1000000 steps"):
        for _ in range(10):
            pattern.matches(name, budget)


def test_a_pattern_whose_program_is_large_is_refused() -> None:
    with pytest.raises(PatternError, match="too large"):
        NamePattern("a{999}" * 80)


def test_patterns_alone_need_re2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    assert PatternTable({"layers.0.q_proj": 1, "q_proj": 2}, StepBudget()).find("model.layers.1.q_proj") == 2
    with pytest.raises(PatternError, match=r"^'\.\*q_proj': .*google-re2, which is not installed") as caught:
        PatternTable({".*q_proj": 1}, StepBudget())
    assert "pip install 'tokenloom[lora]'" in caught.value.mend


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a", "missing \\)"),
        ("a)", "unexpected \\)"),
        ("a)|(b", "unexpected \\)"),
        ("*a", "no argument for repetition"),
        ("a**", "bad repetition"),
        ("a++", "bad repetition"),
        ("[a", r"'\[a' in it is not supported"),
        ("a\\", "not supported"),
        ("[b-a]", "invalid character class range"),
        ("a{3,2}", "invalid repetition size"),
        ("a{1001}", "invalid repetition size"),
        ("(?=a)", r"'\(\?=' in it is not supported"),
        ("(?P<n>a)", "not supported"),
        ("(?i)a", "not supported"),
        (r"(a)\1", r"'\\\\1' in it is not supported"),
        (r"\ba", "not supported"),
        (r"\Qa.b\E", "not supported"),
        ("[^é]", "not ASCII"),
        ("a" * 501, "501 characters"),
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
    with pytest.raises(PatternError, match="101 keys are regular expressions, at most 100 may be"):
        PatternTable({f"layers.{layer}.(q|k)_proj": 1 for layer in range(101)}, StepBudget())
