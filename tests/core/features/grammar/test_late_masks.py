"""A step waits for masks for a moment only: rows without a grammar, and those with their masks, go on while a helper
hangs, is replaced or is slow. No token changes."""

from __future__ import annotations

from tokenloom.core.features.grammar.helper import ANSWER_TIMEOUT_S
from tokenloom.core.features.grammar.manager import LATE_S
from tokenloom.tests.core.features.grammar.grammar_harness import GrammarHarness
from tokenloom.tests.core.harness import Harness

PLAIN, STRUCTURED = 0, 1


class Engine:
    """A core with a plain request and structured ones. The helper answers in `calm` turns only; time passes by
    itself."""

    def __init__(self, *texts: str, **options: object) -> None:
        self.now = 0.0
        self.harness = GrammarHarness(monotonic=lambda: self.now, **options)
        self.harness.add(PLAIN, [1, 2, 3], 100)
        for i, text in enumerate(texts):
            self.harness.ask(STRUCTURED + i, [1, 2, 3 + i], 30, text)
        for _ in range(6):
            self.harness.turn()
        assert all(self.harness.tokens[STRUCTURED + i] for i in range(len(texts)))

    @property
    def num_plain(self) -> int:
        return len(self.harness.tokens[PLAIN])

    @property
    def num_structured(self) -> int:
        return len(self.harness.tokens[STRUCTURED])

    def turn(self, seconds: float = 0.0) -> None:
        """The core goes on while the helper does nothing."""
        self.now += seconds
        self.harness.core.grammars.take()
        Harness.turn(self.harness)

    def finish(self) -> None:
        self.harness.run()
        for key in self.harness.requests:
            if key not in self.harness.aborted:
                self.harness.check(key)
        assert not self.harness.grammars.open_grammars


def test_rows_without_a_grammar_go_on_while_the_helper_hangs() -> None:
    engine = Engine("7,30", "9,30")
    engine.turn()
    before = engine.num_plain, engine.num_structured
    for _ in range(5):
        engine.turn()
    assert engine.num_plain <= before[0] + 1, "the step in flight waits for masks"
    engine.turn(LATE_S)
    at = engine.num_plain
    for _ in range(20):
        engine.turn()
    assert engine.num_plain >= at + 19, "a token in each step"
    assert engine.num_structured == before[1]
    engine.finish()


def test_masks_that_come_late_are_used_and_not_made_again() -> None:
    engine = Engine("7,30")
    for _ in range(60):  # each answer of the helper comes later than a step waits
        engine.turn(LATE_S)
        engine.turn(LATE_S)
        engine.harness.grammars.work()
        engine.turn()
        engine.turn()
        if STRUCTURED in engine.harness.finished:
            break
    assert STRUCTURED in engine.harness.finished, "an answer with masks that are always late goes on, if slowly"
    engine.finish()


def test_a_row_with_an_open_grammar_goes_on_while_a_new_helper_opens_another() -> None:
    engine = Engine("7,30", "9,30")
    helper = engine.harness.grammars
    helper.die()
    engine.turn()  # both are to be opened again
    late = helper.inbox.pop()
    for _ in range(12):
        helper.work()
        engine.turn()
    engine_at = engine.num_plain
    assert engine_at > 12 and len(engine.harness.tokens[STRUCTURED]) > 6
    assert engine.harness.core.num_requests == 3
    helper.inbox.append(late)
    engine.finish()


def test_a_helper_that_hangs_is_replaced_and_no_answer_changes() -> None:
    engine = Engine("7,30", "9,30")
    helper, num_starts = engine.harness.grammars, engine.harness.grammars.num_starts
    while helper.num_starts == num_starts:
        engine.turn(LATE_S)
        assert engine.now < 4 * ANSWER_TIMEOUT_S
    assert engine.num_plain > ANSWER_TIMEOUT_S / LATE_S - 4, "a token in each of the turns meanwhile"
    engine.finish()


def test_prompts_are_computed_while_masks_are_late() -> None:
    engine = Engine("7,30", max_num_seqs=8, max_num_batched_tokens=16)
    engine.turn()
    engine.turn(LATE_S)
    engine.harness.ask(7, list(range(40)), 10, "5,10")
    engine.harness.add(8, list(range(40)), 10)
    for _ in range(20):
        engine.turn()
    assert len(engine.harness.tokens[8]) > 1 and not engine.harness.tokens[7]
    engine.finish()


def test_calm_masks_preempt_nobody() -> None:
    engine = Engine("7,30", "9,30")
    engine.finish()
    assert engine.harness.core.scheduler.num_preemptions == 0
