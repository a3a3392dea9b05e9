"""A grammar is tried by a short walk through it, so that a bad one is refused before its answer begins; one whose masks
become slow later ends its own answer alone."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLExecutor, LLMatcher

from tokenloom.core.features.grammar.compiler import Matcher
from tokenloom.core.features.grammar.server import PARALLEL_FROM, GrammarServer, _any_token
from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.grammar import RESTART, AdvanceGrammars, GrammarFailure, OpenGrammar
from tokenloom.ipc.params.structured_outputs import GrammarKind
from tokenloom.tests.core.harness import make_spec
from tokenloom.tests.support.engine_specs import in_folder


class Clock:
    """The CPU's time, which slow matchers spend."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowMatcher(Matcher):
    """Matcher whose masks take `seconds` each."""

    def __init__(self, inner: Matcher, clock: Clock, seconds: float) -> None:
        super().__init__(inner.inner)
        self._clock, self._seconds = clock, seconds

    def fill_at(self, address: int, num_bytes: int) -> None:
        self._clock.now += self._seconds
        super().fill_at(address, num_bytes)


def new_server(folder: Path, **options: Any) -> GrammarServer:
    return GrammarServer(in_folder(make_spec(), folder, tokenizer_folder=str(DEMO_FOLDER)), **options)


def optional(count: int) -> str:
    """A schema of properties that may all be absent."""
    return json.dumps({"type": "object", "properties": {f"k{i}": {"enum": [1]} for i in range(count)}})


def branches(count: int) -> str:
    parts = [{"type": "object", "properties": {f"k{i}": {"enum": [1]}}, "required": [f"k{i}"]} for i in range(count)]
    return json.dumps({"anyOf": parts})


@pytest.fixture
def frozen() -> Iterator[None]:
    """Let the collector look at the objects of a test alone, as in a process of its own: a look at those of all tests
    takes half of the time that a schema may."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json", optional(1500), ""),
        ("json", optional(3000), "Current row has"),
        ("json", branches(3000), ""),
        ("regex", "x((a{100}){100}){100}", "masks take|too many expressions"),
        ("regex", "[a-z]{3,9}", ""),
        ("lark", "start: a\na: b", "unknown name"),
    ],
)
def test_a_grammar_that_would_fail_in_its_answer_is_refused_before(
    kind: GrammarKind, text: str, words: str, tmp_path: Path
) -> None:
    result = new_server(tmp_path, cache_size=0).prove(OpenGrammar(grammar_id=1, kind=kind, text=text))
    if words:
        assert isinstance(result, ErrorInfo)
        assert any(each in result.message for each in words.split("|")), result.message
    else:
        assert not isinstance(result, ErrorInfo), result.message


def test_the_walk_takes_any_token_that_is_allowed_and_no_other() -> None:
    words, draw = np.zeros(49152 // 32, np.uint32), random.Random(0)
    allowed = {0, 31, 32, 1000, 49151}
    for token_id in allowed:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    assert {_any_token(words, draw) for _ in range(300)} == allowed


def served(server: GrammarServer, clock: Clock, seconds: list[float], num_steps: int) -> list[GrammarFailure]:
    """Give each of several answers one letter a step, and masks that take so long; return those that failed."""
    for i, each in enumerate(seconds):
        matcher = server.compile(OpenGrammar(grammar_id=i, kind="regex", text="[a-z]*"))
        assert isinstance(matcher, Matcher)
        server.open(i, SlowMatcher(matcher, clock, each) if each else matcher)
    failures, ids = list[GrammarFailure](), encode_ids(range(len(seconds)))
    token_id = -1
    for serial in range(num_steps):
        tokens = encode_ids([token_id] * len(seconds) if serial else [])
        answer = server.advance(
            AdvanceGrammars(grammar_ids=ids if serial else b"", token_ids=tokens, serial=serial + 1, mask_ids=ids)
        )
        words = np.frombuffer(answer.bits, np.uint8).reshape(len(decode_ids(answer.mask_ids)), -1)
        token_id = int(np.flatnonzero(np.unpackbits(words[-1], bitorder="little"))[-1])
        failures += answer.failures
    return failures


@pytest.mark.parametrize(("seconds", "is_ended"), [(0.7, True), (0.2, True), (0.09, False), (0.0, False)])
def test_an_answer_whose_masks_become_slow_ends_alone(seconds: float, is_ended: bool, tmp_path: Path) -> None:
    clock = Clock()
    server = new_server(tmp_path, thread_time=clock, process_time=clock)
    failures = served(server, clock, [0.0, seconds, 0.0], 30)
    assert [each.grammar_id for each in failures] == [1] * is_ended
    assert all("masks take" in str(each.error.message) for each in failures)


class SlowExecutor:
    """The library's executor, which takes long for so many answers."""

    def __init__(self, clock: Clock, num_slow: int, seconds: float) -> None:
        self._inner, self._clock, self._num_slow, self._seconds = LLExecutor(1), clock, num_slow, seconds
        self.num_calls = 0

    def unsafe_compute_mask_ptr(self, pairs: list[tuple[LLMatcher, int]], *place: int) -> None:
        self.num_calls += 1
        self._clock.now += self._seconds * (len(pairs) == self._num_slow)
        self._inner.unsafe_compute_mask_ptr(pairs, *place)


@pytest.mark.parametrize("seconds", [0.0, 0.7])
def test_one_slow_answer_among_many_is_found_and_the_others_go_on_together(seconds: float, tmp_path: Path) -> None:
    clock = Clock()
    server = new_server(tmp_path, thread_time=clock, process_time=clock)
    num_answers, num_steps = 2 * (PARALLEL_FROM // make_spec().model.vocab_size + 1), 10
    server._executor = executor = SlowExecutor(clock, num_answers, seconds)  # type: ignore[assignment]
    failures = served(server, clock, [seconds * (i == 3) for i in range(num_answers)], num_steps)
    assert [each.grammar_id for each in failures] == [3] * (seconds > 0)
    assert executor.num_calls == num_steps - 1 * (seconds > 0), "in one step each is timed alone"


def walk_to_the_end(server: GrammarServer, draw: random.Random) -> tuple[bytes, list[int]]:
    """Let grammar 1 take random tokens until it is complete; return its first mask and the tokens."""
    first, taken = b"", list[int]()
    while True:
        last = encode_ids(taken[-1:])
        answer = server.advance(
            AdvanceGrammars(
                grammar_ids=encode_ids([1] * bool(taken)), token_ids=last, serial=1, mask_ids=encode_ids([1])
            )
        )
        assert not answer.failures
        if answer.complete_ids:
            assert not answer.mask_ids, "the part behind it is free"
            return first, taken
        first = first or answer.bits
        taken.append(_any_token(np.frombuffer(answer.bits, np.uint32), draw))


@pytest.mark.parametrize("repeats", [True, False])
def test_a_grammar_that_repeats_is_at_its_start_again_behind_its_end(repeats: bool, tmp_path: Path) -> None:
    server, draw = new_server(tmp_path), random.Random(0)
    order = OpenGrammar(grammar_id=1, kind="regex", text="[a-z]{3,9}:[0-9]{2}", repeats=repeats)
    assert not server.open(1, server.compile(order)).is_complete
    mask, tokens = walk_to_the_end(server, draw)
    order_again = AdvanceGrammars(grammar_ids=b"", token_ids=b"", serial=2, mask_ids=encode_ids([1]))
    if repeats:
        for _ in range(3):
            assert not server.advance(order_again).mask_ids
            restart = AdvanceGrammars(grammar_ids=encode_ids([1]), token_ids=encode_ids([RESTART]), serial=3)
            assert not server.advance(restart).complete_ids
            assert walk_to_the_end(server, draw)[0] == mask
    assert not server.advance(order_again).mask_ids, "no mask before it is told to start again"
    resumed = OpenGrammar(
        grammar_id=2, kind="regex", text=order.text, token_ids=encode_ids([*tokens, 5, *tokens]), repeats=repeats
    )
    opened = server.open(2, server.compile(resumed))
    assert (opened.is_complete, opened.num_tokens) == (True, len(tokens)), "the tokens behind it are none of it"
