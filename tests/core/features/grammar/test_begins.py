"""A grammar that applies to parts of an answer leaves the others as they are, and costs them nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from tokenloom.core.features.grammar.manager import LATE_S
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.messages.core import ConstraintBegin
from tokenloom.ipc.messages.grammar import AdvanceGrammars
from tokenloom.ipc.messages.workers import SchedulerOutput, TokenMask
from tokenloom.tests.core.features.grammar.grammar_harness import GrammarHarness, expected_with_grammar
from tokenloom.tests.core.harness import Harness
from tokenloom.tests.support.today import some

PROMPT, LENGTH = [1, 2, 3], 60
EVERY = 6  # of the moments of an answer one is tried in a test
GRAMMAR = "7,6,1"  # a call: its first token, and five of every seventh
CALLS = [ConstraintBegin(token_ids=encode_ids([token]), is_included=True) for token in range(0, 997, 11)]
THOUGHT_ENDS = [ConstraintBegin(token_ids=encode_ids([token])) for token in range(5, 997, 7)]
TRIGGERS = encode_ids(range(0, 997, 11))
LEAVING = "7,6,1,2"  # as GRAMMAR, but an even token behind the first leaves the call
THOUGHT = ConstraintBegin(token_ids=encode_ids([3, 4]))


class Counting(GrammarHarness):
    """Keeps the messages of the core to the workers and to the helper."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.steps, self.masks, self.advances = list[SchedulerOutput](), list[TokenMask](), list[AdvanceGrammars]()
        self._send_to_workers, self._send_to_helper = self.worker.send, self.grammars.send
        self.worker.send = self._to_workers  # type: ignore[method-assign]
        self.grammars.send = self._to_helper  # type: ignore[method-assign]

    def _to_workers(self, message: SchedulerOutput | TokenMask) -> None:
        (self.masks if isinstance(message, TokenMask) else self.steps).append(message)  # type: ignore[arg-type]
        self._send_to_workers(message)

    def _to_helper(self, message: object) -> None:
        if isinstance(message, AdvanceGrammars):
            self.advances.append(message)
        self._send_to_helper(message)  # type: ignore[arg-type]

    def ask_for_calls(self, key: int = 0, begins: Sequence[ConstraintBegin] = CALLS, **more: object) -> None:
        self.ask(key, PROMPT, LENGTH, GRAMMAR, constraint_begins=list(begins), constraint_repeats=True, **more)

    def check_all(self) -> None:
        for key in self.texts:
            self.check(key)
        assert not self.grammars.open_grammars


def num_constrained(harness: GrammarHarness, key: int) -> tuple[int, int]:
    """Return the numbers of an answer's constrained parts and of the tokens in them that have a mask."""
    parts = harness.parts_of(key)
    for token in harness.tokens[key]:
        parts.take(token)
    return parts.num_parts, parts.num_masked


def test_calls_are_constrained_and_the_prose_between_them_is_free() -> None:
    harness = Counting()
    harness.ask_for_calls()
    harness.run()
    harness.check_all()
    num_parts, num_masked = num_constrained(harness, 0)
    assert num_parts >= 3 and harness.finished[0].reason == "length"
    masked_steps = [step for step in harness.steps if step.is_mask_pending]
    num_ends = num_parts  # the step behind a part is sent before the part's end is known, and gets no mask
    assert num_masked <= len(masked_steps) <= num_masked + num_ends
    assert len(harness.masks) == len(masked_steps), "a step without a mask waits for none"
    assert sum(len(mask.rows) > 0 for mask in harness.masks) == num_masked


def test_an_answer_that_never_begins_a_call_sends_no_message_more_than_one_without_a_grammar() -> None:
    unused = [ConstraintBegin(token_ids=encode_ids([token]), is_included=True) for token in (996, 995)]
    sent = []
    for begins in (unused, None):
        harness = Counting()
        if begins is None:
            harness.add(0, PROMPT, LENGTH)
        else:
            harness.ask_for_calls(begins=begins)
        harness.add(1, PROMPT, LENGTH)
        harness.run()
        assert not harness.masks and not harness.advances
        assert not any(step.is_mask_pending for step in harness.steps)
        sent.append([(step.rows, step.counts) for step in harness.steps if decode_ids(step.rows)[:]])
    assert len(harness.tokens[1]) == LENGTH
    assert len(sent[0]) <= len(sent[1]) + 2, "a step or two while the grammar is compiled"


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {}], ids=["no cache", "cache"])
def test_a_begin_computes_one_token_again_and_preempts_nobody(options: dict[str, object]) -> None:
    harness = Counting(**options)
    harness.ask_for_calls()
    harness.add(1, PROMPT, LENGTH)
    harness.run()
    harness.check_all()
    num_parts, _ = num_constrained(harness, 0)
    num_in_flight = LENGTH - 1 + 2 * len(PROMPT) + LENGTH - 1
    assert num_parts >= 3 and harness.worker.num_computed_tokens <= num_in_flight + num_parts
    assert harness.core.scheduler.num_preemptions == 0 and harness.finished[0].num_preemptions == 0


def test_an_answer_starts_once_though_its_row_is_sent_again() -> None:
    harness, started = Counting(), list[int]()
    harness.ask_for_calls()
    while harness.core.num_requests:
        harness.mask()
        harness.core.step()
        if (result := harness.worker.answer()) is not None:
            harness.core.on_result(result)
        for _, outputs in harness.core.take_outputs():
            started += [each.key for each in outputs.started]
    assert sum(len(step.new_rows) for step in harness.steps) > 1, "no row is sent again"
    assert started == [0]


def lose_helper(harness: GrammarHarness) -> None:
    harness.grammars.die()


def lose_core(harness: GrammarHarness) -> None:
    harness.lose_core(1)


def lose_worker(harness: GrammarHarness) -> None:
    harness.lose_worker()


def preempt(harness: GrammarHarness) -> None:
    for request in harness.core.scheduler.rows.requests():
        harness.core.scheduler.preempt(request)


@pytest.mark.parametrize("trouble", [lose_helper, lose_core, lose_worker, preempt])
@pytest.mark.parametrize("num_ahead", [1, 2])
@pytest.mark.parametrize("first", some(range(1, EVERY + 1), 1))
def test_parts_stay_where_they_are_whenever_something_is_lost(
    trouble: Callable[[GrammarHarness], None], num_ahead: int, first: int
) -> None:
    begins = [*CALLS, THOUGHT]
    expected, _ = expected_with_grammar(GRAMMAR, PROMPT, 0, LENGTH, [], begins, repeats=True)
    for at in range(first, LENGTH, EVERY):
        harness = GrammarHarness(steps_in_flight=num_ahead)
        harness.ask(0, PROMPT, LENGTH, GRAMMAR, constraint_begins=begins, constraint_repeats=True)
        while harness.core.num_requests:
            harness.turn()
            if len(harness.tokens[0]) >= at and harness.core.num_requests:
                at = LENGTH
                trouble(harness)
        harness.run()
        assert (harness.tokens[0], harness.finished[0].reason) == (expected, "length")


@pytest.mark.parametrize("first", some(range(EVERY), 1))
def test_a_resumed_answer_is_read_again_from_its_first_call_on(first: int) -> None:
    expected, _ = expected_with_grammar(GRAMMAR, PROMPT, 0, LENGTH, [], CALLS, repeats=True)
    for num_known in range(first, LENGTH, EVERY):
        harness = GrammarHarness()
        harness.ask(
            0, PROMPT, LENGTH, GRAMMAR, constraint_begins=CALLS, constraint_repeats=True, outputs=expected[:num_known]
        )
        harness.run()
        harness.check(0)


def test_the_answers_of_one_request_have_parts_of_their_own() -> None:
    harness = Counting()
    harness.ask_for_calls(n=4)
    harness.texts |= dict.fromkeys(range(4), GRAMMAR)
    harness.run()
    harness.check_all()
    assert len({tuple(harness.tokens[key]) for key in range(4)}) == 4
    assert all(num_constrained(harness, key)[0] for key in range(4))


@pytest.mark.parametrize("accuracy", [0.0, 0.9, 1.0])
def test_no_draft_stands_behind_a_begin(accuracy: float) -> None:
    harness = Counting(steps_in_flight=1)
    harness.give_adversary(random.Random(1), accuracy)
    for key in range(3):
        harness.ask_for_calls(key, [*CALLS, THOUGHT])
    harness.run()
    harness.check_all()
    ends = {begin.last_id for begin in [*CALLS, THOUGHT]}
    drafts = [list(decode_ids(step.drafts)) for step in harness.steps if step.drafts]
    for left in drafts:
        while left:
            count = left[1]
            assert ends.isdisjoint(left[2 : 2 + count])
            left = left[2 + count :]
    assert harness.worker.num_drafts > 20 and (harness.worker.num_accepted > 10) == (accuracy > 0)


def test_forced_tokens_end_a_part_and_leave_what_follows_free() -> None:
    harness = Counting()
    harness.ask(0, PROMPT, LENGTH, "992,8,1", constraint_begins=CALLS, constraint_repeats=True)  # two tokens at most
    harness.run()
    harness.check_all()
    num_parts, num_masked = num_constrained(harness, 0)
    assert num_parts >= 2 and sum(len(mask.rows) > 0 for mask in harness.masks) < num_masked, "some needed no mask"


def test_a_constraint_that_does_not_repeat_ends_the_answer_with_its_part() -> None:
    harness = Counting()
    harness.ask(0, PROMPT, LENGTH, GRAMMAR, constraint_begins=[*CALLS, THOUGHT])
    harness.run()
    harness.check_all()
    assert harness.finished[0].reason == "stop" and num_constrained(harness, 0)[0] == 1


def test_a_call_that_begins_while_its_grammar_is_not_open_waits_for_it() -> None:
    now = [0.0]
    harness = Counting(monotonic=lambda: now[0])
    harness.ask_for_calls()
    harness.add(1, PROMPT, LENGTH)
    while not harness.tokens[0]:
        harness.turn()
    harness.grammars.die()
    while len(harness.tokens[1]) < LENGTH:  # the helper opens nothing
        now[0] += LATE_S
        harness.core.grammars.take()
        Harness.turn(harness)
    known = len(harness.tokens[0])
    parts = harness.parts_of(0)
    for token in harness.tokens[0]:
        parts.take(token)
    assert parts.part == [harness.tokens[0][-1]] and known < LENGTH, "the begin of a call is the last token"
    harness.run()
    harness.check_all()


def test_models_that_cannot_sample_again_wait_for_empty_masks() -> None:
    harness = Counting()
    harness.core.grammars._can_void = False
    harness.ask_for_calls()
    harness.run()
    harness.check_all()
    assert all(step.is_mask_pending for step in harness.steps)
    assert sum(len(step.new_rows) for step in harness.steps) == 1, "no row is sent again"


def ask_with_triggers(harness: GrammarHarness, begins: Sequence[ConstraintBegin] = (), **more: object) -> None:
    harness.ask(
        *(0, PROMPT, LENGTH, LEAVING),
        constraint_begins=list(begins),
        constraint_triggers=TRIGGERS,
        constraint_repeats=True,
        **more,
    )


@pytest.mark.parametrize("begins", [[], THOUGHT_ENDS], ids=["prose", "thought"])
def test_masks_end_where_the_text_leaves_a_call_that_a_trigger_may_begin(begins: list[ConstraintBegin]) -> None:
    harness = Counting()
    ask_with_triggers(harness, begins)
    harness.run()
    harness.check_all()
    num_parts, num_masked = num_constrained(harness, 0)
    assert num_parts >= 3 and num_masked < 5 * num_parts, "some are left"
    assert sum(len(mask.rows) > 0 for mask in harness.masks) == num_masked


@pytest.mark.parametrize("begins", [[], THOUGHT_ENDS], ids=["prose", "thought"])
@pytest.mark.parametrize("trouble", [lose_helper, lose_core, lose_worker, preempt])
@pytest.mark.parametrize("first", some(range(1, EVERY + 1), 1))
def test_triggered_parts_stay_where_they_are_whenever_something_is_lost(
    trouble: Callable[[GrammarHarness], None], begins: list[ConstraintBegin], first: int
) -> None:
    triggers = decode_ids(TRIGGERS)
    expected, _ = expected_with_grammar(LEAVING, PROMPT, 0, LENGTH, [], begins, repeats=True, triggers=triggers)
    for at in range(first, LENGTH, EVERY):
        harness = GrammarHarness()
        ask_with_triggers(harness, begins)
        while harness.core.num_requests:
            harness.turn()
            if len(harness.tokens[0]) >= at and harness.core.num_requests:
                at = LENGTH
                trouble(harness)
        harness.run()
        assert (harness.tokens[0], harness.finished[0].reason) == (expected, "length")


@pytest.mark.parametrize("accuracy", [0.0, 0.9, 1.0])
def test_no_draft_stands_behind_a_trigger(accuracy: float) -> None:
    harness = Counting(steps_in_flight=1)
    harness.give_adversary(random.Random(1), accuracy)
    ask_with_triggers(harness)
    harness.run()
    harness.check_all()
    drafts = [list(decode_ids(step.drafts)) for step in harness.steps if step.drafts]
    assert drafts and set(decode_ids(TRIGGERS)).isdisjoint(token for each in drafts for token in each[2:])
