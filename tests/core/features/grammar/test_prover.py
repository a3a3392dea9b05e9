"""Unknown grammars are tried in a process that may be killed: a hostile one is really stopped, is tried once however
often it is sent, and is blamed only if the process was up. No answer notices."""

from __future__ import annotations

import pytest

from tokenloom.core.features.grammar.helper import ANSWER_TIMEOUT_S, NUM_COMPILERS, REOPEN_S
from tokenloom.core.features.grammar.prover import MAX_WAIT_S, PATIENCE, REFUSED_S, GrammarProver
from tokenloom.ipc.process.awake_clock import AwakeClock
from tokenloom.tests.core.features.grammar.fake_grammar_helper import FakeGrammarHelper

LIMIT_S = 2.0


class Bench:
    """A prover, its fake process and a clock that the test moves."""

    def __init__(self) -> None:
        self.now, self.helper = 0.0, FakeGrammarHelper()
        self.clock = AwakeClock(100.0, lambda: self.now)
        self.prover = GrammarProver(self.helper, LIMIT_S, self.clock)
        self.errors: dict[int, str | None] = {}

    def add(self, grammar_id: int, text: str, *, caller: str = "", is_resumed: bool = False) -> None:
        self.prover.add(grammar_id, "lark", text, caller=caller, is_resumed=is_resumed)

    def turn(self, seconds: float = 0.0, *, works: bool = True) -> None:
        self.now += seconds
        self.clock.look()
        if works:
            self.helper.work()
        for grammar_id, error in self.prover.take():
            self.errors[grammar_id] = None if error is None else str(error.message)

    def settle(self, seconds: float = LIMIT_S) -> None:
        for _ in range(4):
            self.turn(seconds)


def test_the_same_grammar_is_tried_once_however_often_it_is_sent() -> None:
    bench = Bench()
    for i in range(200):
        bench.add(i, "slow")
    bench.settle()
    assert len(bench.errors) == 200 and bench.helper.num_starts == 1
    for i in range(200, 400):
        bench.add(i, "slow")
        bench.turn(0.01)
        assert "not compiled" in str(bench.errors[i])
    assert bench.helper.num_starts == 1
    bench.turn(REFUSED_S)
    bench.add(500, "slow")
    bench.settle()
    assert bench.helper.num_starts == 2 and 500 in bench.errors, "it may have been the machine's fault"


def test_a_proven_grammar_is_not_compiled_again() -> None:
    bench = Bench()
    bench.add(1, "3,8")
    bench.settle()
    bench.helper.die()
    bench.add(2, "3,8")
    bench.turn(works=False)
    assert bench.errors == {1: None, 2: None}


def test_a_grammar_is_not_blamed_for_a_process_that_ends_before_it_is_up() -> None:
    bench = Bench()
    for i in range(1, 4):
        bench.add(i, f"{i},8")
    for _ in range(20):  # at the limit of tasks it ends each time
        bench.helper.outbox.clear()
        bench.helper.die()
        bench.turn(works=False)
        assert not bench.errors
        bench.turn(REOPEN_S, works=False)
    assert bench.helper.num_starts > 3
    bench.settle()
    assert bench.errors == {1: None, 2: None, 3: None}


def test_starts_that_fail_are_tried_again() -> None:
    bench = Bench()
    bench.helper.num_refusals = 5
    bench.add(1, "3,8")
    for _ in range(10):
        deadline = bench.prover.next_deadline
        if deadline is None:
            break
        bench.turn(max(deadline - bench.now, 0.0))
    bench.turn()
    assert bench.errors == {1: None}


def test_a_process_that_hangs_is_replaced_and_a_grammar_at_which_it_hangs_twice_is_refused() -> None:
    bench = Bench()
    bench.add(1, "3,8")
    bench.turn()
    bench.add(2, "4,8")
    bench.turn(works=False)
    bench.turn(LIMIT_S, works=False)  # asked for a sign of life
    bench.turn(ANSWER_TIMEOUT_S, works=False)
    assert 2 not in bench.errors, "it may have been another one's fault"
    bench.turn()
    assert bench.errors == {1: None, 2: None}


def test_a_resumed_grammar_gets_more_time() -> None:
    bench = Bench()
    bench.add(1, "slow", is_resumed=True)
    bench.turn()
    for _ in range(PATIENCE - 2):
        bench.turn(LIMIT_S)
        bench.turn()
    assert not bench.errors
    bench.settle()
    assert "not compiled within 20 s" in str(bench.errors[1])


def test_a_newcomer_waits_for_no_crowd_and_nobody_starves() -> None:
    bench = Bench()
    for i in range(200):
        bench.add(i, f"slow {i}")
    bench.turn(LIMIT_S)
    bench.add(1000, "3,8")
    while 1000 not in bench.errors and len(bench.errors) < 200:
        bench.turn(LIMIT_S)
    assert bench.errors.pop(1000) is None
    assert len(bench.errors) <= 2 * NUM_COMPILERS, "others were tried before"
    for i in range(2000, 2040):  # a new one each time, and some old one gets its turn
        num_before = sum(each < 200 for each in bench.errors)
        bench.add(i, f"slow {i}")
        for _ in range(3):
            bench.turn(LIMIT_S)
        assert sum(each < 200 for each in bench.errors) > num_before


@pytest.mark.parametrize("num_hostile", [1, 8])
def test_a_crowd_of_some_callers_does_not_hold_up_another_one(num_hostile: int) -> None:
    bench = Bench()
    for i in range(200):
        bench.add(i, f"slow {i}", caller=f"hostile {i % num_hostile}")
    num_tried = list[int]()
    for honest in range(1000, 1020):
        bench.turn(LIMIT_S)
        before = sum(each < 1000 for each in bench.errors)
        bench.add(honest, f"{honest},8", caller="honest")
        bench.add(honest + 1000, f"{honest},9", caller="honest")
        while {honest, honest + 1000} - set(bench.errors):
            bench.turn(LIMIT_S / 20)
        num_tried.append(sum(each < 1000 for each in bench.errors) - before)
    assert max(num_tried) <= max(num_hostile, NUM_COMPILERS), "nobody had used a compiler before the first"
    assert sum(num_tried[1:]) <= 2 * len(num_tried) * NUM_COMPILERS
    while len(bench.errors) < 240:
        bench.turn(LIMIT_S)
    assert len(bench.prover._caller_by_name) <= num_hostile + 1 and not bench.prover.is_active


def test_a_caller_of_slow_grammars_leaves_a_compiler_to_others() -> None:
    bench = Bench()
    bench.add(99, "3,8", caller="honest")
    bench.turn()
    for i in range(20):
        bench.add(i, f"slow {i}", caller="hostile")
    while len(bench.errors) < 1 + NUM_COMPILERS:
        bench.turn(LIMIT_S)
    bench.turn()
    assert len(bench.prover._compiling) == 1
    for i in range(100, 104):
        before = len(bench.errors)
        bench.add(i, f"{i},8", caller="honest")
        bench.turn()
        assert bench.errors[i] is None and len(bench.errors) == before + 1, "at once"
    while len(bench.errors) < 25:
        bench.turn(LIMIT_S)


def test_callers_that_have_used_the_compilers_equally_take_turns() -> None:
    bench = Bench()
    for i in range(60):
        bench.add(i, f"slow {i}", caller="early" if i < 40 else f"late {i}")
    while len(bench.errors) < 30:
        bench.turn(LIMIT_S)
    assert sum(each >= 40 for each in bench.errors) == 20, "each has one"


def test_callers_that_come_and_go_starve_nobody() -> None:
    bench, num_turns = Bench(), 0
    bench.add(0, "slow 0", caller="steady")
    bench.turn(LIMIT_S)
    bench.turn()
    bench.add(1, "4,8", caller="steady")
    while 1 not in bench.errors:
        num_turns += 1
        for i in range(NUM_COMPILERS + 1):
            bench.add(100 * num_turns + i, f"slow {num_turns} {i}", caller=f"{num_turns} {i}")
        bench.turn(LIMIT_S)
        assert num_turns < 40


def test_grammars_that_two_callers_share_are_tried_with_the_first_that_is_next() -> None:
    bench = Bench()
    for i in range(40):
        bench.add(i, f"slow {i}", caller="hostile")
    bench.add(40, "4,8", caller="hostile")
    bench.add(41, "slow 41", caller="hostile")
    bench.add(42, "4,8", caller="honest")
    for _ in range(8):
        bench.turn(LIMIT_S)
    assert bench.errors[40] is bench.errors[42] is None
    assert len(bench.errors) < 12


def test_a_caller_whose_grammars_would_wait_too_long_is_refused_and_others_are_not() -> None:
    bench, num_most = Bench(), int(MAX_WAIT_S / LIMIT_S)
    num_sent = 4 * num_most
    for i in range(num_sent):
        bench.add(i, f"slow {i}", caller="hostile", is_resumed=i == num_sent - 1)
        bench.prover.add(num_sent + i, "lark", f"{i},8", caller="honest", is_resumed=False)
    refused, num_left = list[str](), num_sent
    while num_left > num_most + NUM_COMPILERS + 1:
        bench.turn(LIMIT_S / 20)
        found = {i: error for i, error in bench.errors.items() if i < num_sent}
        refused = [str(error) for error in found.values() if "wait to be compiled" in str(error)]
        num_left = num_sent - len(found)
        assert len(found) - len(refused) < 60
    assert "of this caller that are new" in refused[0] and "send simpler ones, or ask again later" in refused[0]
    assert "wait to be" not in str(bench.errors.get(num_sent - 1)), "it was accepted before"
    assert not any(error for i, error in bench.errors.items() if i >= num_sent)
    more = range(3 * num_sent, 3 * num_sent + 2 * NUM_COMPILERS)
    for i in more:
        bench.add(i, f"slow {i}", caller="hostile")
    bench.turn(works=False)
    assert "wait to be compiled" in str(bench.errors[more[-1]])


def test_dropped_grammars_hold_no_memory_while_others_are_compiled() -> None:
    bench = Bench()
    for i in range(500):
        bench.add(i, f"slow {i}")
        if i >= NUM_COMPILERS:
            bench.prover.drop(i)
    assert len(bench.prover._trial_by_key) == NUM_COMPILERS
    for i in range(NUM_COMPILERS):
        bench.prover.drop(i)
    bench.settle()
    assert not bench.errors and not bench.prover.is_active
