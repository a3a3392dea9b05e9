"""Requests with a grammar get the tokens that their grammar and their draws give, whatever comes between; a bad
grammar ends its own request and nothing else. The grammars are a fake helper's."""

from __future__ import annotations

import msgspec
import pytest

from tokenloom.core.features.grammar.helper import ANSWER_TIMEOUT_S, SIGN_S
from tokenloom.core.features.grammar.manager import MAX_LOSSES
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.messages.core import ConstraintBegin
from tokenloom.ipc.messages.grammar import AdvanceGrammars
from tokenloom.tests.core.fake_worker import expected_tokens
from tokenloom.tests.core.features.grammar.grammar_harness import GrammarHarness, expected_with_grammar
from tokenloom.tests.core.harness import Harness


def test_the_next_step_is_sent_with_the_masks_of_the_first_and_not_with_its_result() -> None:
    harness = GrammarHarness()
    harness.ask(0, [1, 2, 3], 20, "7,20")
    harness.mask()
    assert harness.core.step() == 1
    assert harness.worker.answer() is None, "the first step waits for its mask"
    harness.mask()
    assert harness.core.step() == 1 and len(harness.worker.queue) == 2
    harness.run_to_the_end()


FORCING = "992,40"  # leaves one token, and at times two


def test_forced_tokens_are_computed_together() -> None:
    harness = GrammarHarness()
    harness.ask(0, [1, 2, 3], 40, FORCING)
    harness.run_to_the_end()
    assert harness.worker.num_steps < 15, "40 tokens, of which most leave no choice"


def test_jump_forward_tokens_leave_with_the_step_that_samples_the_first_of_them() -> None:
    harness, num_told = GrammarHarness(), 0
    harness.ask(0, [1, 2, 3], 40, FORCING)
    while harness.core.num_requests:
        harness.mask()
        harness.take()
        assert len(harness.tokens[0]) == num_told or 0 in harness.finished, "before their step is over"
        Harness.turn(harness)
        for request in harness.core.scheduler.rows.requests():
            num_told = len(harness.tokens[0])
            num_ahead = harness.core.scheduler.rows.num_tokens[0] - request.num_prompt_tokens - num_told
            assert num_ahead == 0, "after their step is over"
    harness.check(0)


def test_a_worker_that_samples_another_token_than_the_forced_one_is_refused() -> None:
    harness = GrammarHarness()
    harness.ask(0, [1, 2, 3], 40, FORCING)
    for _ in range(40):
        harness.mask()
        harness.core.step()
        result = harness.worker.answer()
        if harness.core.scheduler.rows.known_tokens().popitem()[1] > 3 + len(harness.tokens[0]):
            break
        if result is not None:
            harness.core.on_result(result)
            harness.take()
    assert result is not None
    with pytest.raises(ProtocolError, match="differs from the known one"):
        harness.core.on_result(msgspec.structs.replace(result, token_ids=encode_ids([1])))


@pytest.mark.parametrize(
    "params",
    [{"logprobs": 2}, {"bad_words": ["a"]}, {"min_tokens": 2}, {"allowed_token_ids": list(range(997))}],
    ids=lambda params: next(iter(params)),
)
def test_requests_with_logprobs_or_other_token_rules_get_no_jump_forward_tokens(params: dict[str, object]) -> None:
    harness = GrammarHarness()
    harness.ask(0, [1, 2, 3], 40, FORCING, **params)
    harness.run_to_the_end()
    assert harness.worker.num_steps >= 40


def test_a_bad_grammar_fails_its_own_request_and_says_why() -> None:
    harness = GrammarHarness()
    harness.ask(0, [1, 2, 3], 8, "bad")
    harness.ask(1, [1, 2, 3], 8, "3,8")
    harness.run()
    assert harness.error_of(0) == "request: it is bad at 1"
    harness.check(1)


def test_a_slow_grammar_fails_at_its_deadline_and_blocks_no_other() -> None:
    harness = GrammarHarness(grammar_timeout_s=0.01, has_prover=True)
    for key in range(4):
        harness.ask(key, [1, 2, 3], 8, "slow")
    harness.ask(4, [1, 2, 3], 8, "3,8")
    harness.run(max_turns=10_000_000)
    for key in range(4):
        assert "not compiled within 0.01 s" in harness.error_of(key)
    harness.check(4)
    assert harness.prover is not None
    assert not harness.prover.is_started, "its process compiles for nobody"
    assert harness.grammars.num_starts == 1


def test_grammars_wait_while_no_helper_can_be_started() -> None:
    clock = iter(range(1 << 30))  # a second each time that it is read
    harness = GrammarHarness(monotonic=lambda: float(next(clock)))
    harness.grammars.num_refusals = MAX_LOSSES + 1
    for key in range(3):
        harness.ask(key, [1, 2, 3], 8, "3,8")
    assert harness.core.grammars.next_deadline() is not None, "nothing else wakes the core"
    harness.run()
    assert harness.grammars.num_refusals == 0
    for key in range(3):
        harness.check(key)


@pytest.mark.parametrize("stops", [True, False])
def test_an_idle_helper_that_stands_still_is_noticed_by_the_next_grammar(stops: bool) -> None:
    now = [0.0]
    harness = GrammarHarness(monotonic=lambda: now[0])
    harness.ask(0, [1, 2, 3], 8, "3,8")
    harness.run()
    harness.ask(1, [1, 2, 3], 8, "3,8")
    helper, late = harness.grammars, harness.grammars.inbox.pop()  # it compiles
    while helper.num_starts == 1 and now[0] < 40.0:
        assert harness.core.grammars.next_deadline() is not None, "nothing else wakes the core"
        now[0] += 0.25
        if not stops:
            helper.work()
        harness.core.grammars.take()
    if stops:
        assert now[0] <= 2 * (SIGN_S + ANSWER_TIMEOUT_S)
    else:
        assert helper.num_starts == 1, "a helper that answers may compile for long"
        helper.inbox.append(late)
    harness.run_to_the_end()


def test_an_aborted_request_leaves_nothing_open() -> None:
    harness = GrammarHarness()
    for key in range(4):
        harness.ask(key, [1, 2, 3], 50, "3,50")
    harness.abort(0)
    harness.turns(5)
    harness.abort(1)
    harness.ask(2, [1, 2, 3], 50, "3,50", outputs=harness.tokens[2], attempt=1)
    harness.run_to_the_end()
    assert harness.finished[0].reason == harness.finished[1].reason == "abort"
    assert not harness.grammars.open_grammars


def test_a_grammar_that_ends_its_compiler_fails_alone() -> None:
    harness = GrammarHarness(has_prover=True)
    harness.ask(0, [1, 2, 3], 40, "4,40")
    harness.turns(5)
    for key in (1, 2, 3):
        harness.ask(key, [1, 2, 3], 8, "deadly" if key == 2 else "5,8")
    harness.run()
    assert "ended its compiler (the process was ended by a test)" in harness.error_of(2)
    assert harness.prover is not None
    assert harness.prover.num_starts == 2, "it ended one process among others and one alone"
    assert harness.grammars.num_starts == 1, "no answer has noticed"
    for key in (0, 1, 3):
        harness.check(key)


def test_a_request_at_which_the_helper_ends_again_and_again_is_given_up() -> None:
    harness = GrammarHarness()
    harness.ask(0, [1, 2, 3], 40, "0,40")  # its masks are deadly
    harness.add(1, [1, 2, 3], 8)
    harness.run()
    harness.check(1)
    assert harness.error_of(0).startswith("internal: the grammar process has ended 3 times")
    assert harness.grammars.num_starts <= MAX_LOSSES + 1


def test_workers_are_not_blamed_for_a_mask_that_is_late() -> None:
    harness = GrammarHarness()
    harness.ask(0, [1, 2, 3], 8, "3,8")
    harness.mask()
    harness.core.step()
    while_waiting = harness.core.overdue_at, harness.core.grammars.next_deadline() is None
    harness.mask()
    with_mask = harness.core.overdue_at is None, harness.core.grammars.next_deadline()
    assert while_waiting == (None, False) and with_mask == (False, None)
    harness.run_to_the_end()


@pytest.mark.parametrize("loss", ["none", "helper", "core", "worker"])
@pytest.mark.parametrize("width", [1, 2])
def test_a_grammar_is_in_force_after_the_thought_even_after_losses(width: int, loss: str) -> None:
    prompt, text, num_free = [1, 2, 3], "7,20", 9
    free = expected_tokens(prompt, 0, 40, [])
    thought = free[:num_free]
    expected, reason = expected_with_grammar(text, prompt + thought, 0, 40 - num_free, [])
    assert expected != free[num_free:][: len(expected)], "the grammar changes nothing"
    for at in range(2, num_free + 6):
        harness = GrammarHarness()
        harness.ask(0, prompt, 40, text, constraint_begins=[ConstraintBegin(token_ids=encode_ids(thought[-width:]))])
        while harness.core.num_requests:
            harness.turn()
            if len(harness.tokens[0]) == at and harness.core.num_requests:
                at = -1
                if loss == "helper":
                    harness.grammars.die()
                elif loss == "core":
                    harness.lose_core(0)
                elif loss == "worker":
                    harness.lose_worker()
        harness.run()
        assert (harness.tokens[0], harness.finished[0].reason) == (thought + expected, reason)


def test_a_thought_asks_the_helper_for_nothing() -> None:
    harness = GrammarHarness()
    harness.ask(0, [1, 2, 3], 40, "7,20", constraint_begins=[ConstraintBegin(token_ids=encode_ids([996]))])
    harness.turn()
    sent = []
    harness.grammars.send = sent.append  # type: ignore[method-assign]
    harness.run()
    assert len(harness.tokens[0]) == 40 and not [each for each in sent if isinstance(each, AdvanceGrammars)]
