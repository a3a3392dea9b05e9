"""Any order of adds, aborts, late answers and losses keeps grammars in step with tokens."""

from __future__ import annotations

import random

import pytest

from tokenloom.core.grammar.manager import LATE_S
from tokenloom.tests.core.adversary import Adversary
from tokenloom.tests.core.grammar.grammar_harness import GrammarHarness, expected_with_grammar
from tokenloom.tests.core.harness import prompt_of, random_sizes


def run_random_grammars(seed: int, num_operations: int, accuracy: float | None = None) -> GrammarHarness:
    """Adds, aborts, late answers and masks, lost hosts and workers, over pools of random sizes. accuracy: of drafts."""
    rng = random.Random(seed)
    now = [0.0]
    harness = GrammarHarness(monotonic=lambda: now[0], grammar_timeout_s=600.0, **random_sizes(rng))  # type: ignore[arg-type]
    if accuracy is not None:
        harness.proposer = harness.core.scheduler.drafting.proposer = Adversary(rng, accuracy, harness.right_tokens)
    key = num_losses = 0
    for _ in range(num_operations):
        action = rng.random()
        now[0] += rng.choice([0.0] * 9 + [LATE_S])  # for which a step waits
        if action < 0.12 and harness.core.num_requests < 40:
            prompt, max_tokens = prompt_of(rng, rng.randrange(1, 30)), rng.randrange(1, 40)
            if rng.random() < 0.7:
                text = f"{rng.choice([1, 3, 50, 990, 993])},{rng.randrange(1, 40)}"
                stop = prompt_of(rng, rng.choice([0, 0, 2]))
                have = rng.choice([0, 0, rng.randrange(40)])
                outputs = expected_with_grammar(text, prompt, key, max_tokens, stop)[0][:have]
                harness.ask(key, prompt, max_tokens, text, stop=stop, outputs=outputs)
            else:
                harness.add(key, prompt, max_tokens)
            key += 1
        elif action < 0.14 and key:
            harness.abort(rng.randrange(key))
        elif action < 0.15 and num_losses < 1:
            num_losses += 1
            harness.grammars.die()
        elif action < 0.155 and harness.generation < 2:
            harness.lose_worker()
        elif action < 0.4:
            harness.core.step()
        elif action < 0.6:
            harness.grammars.work(rng.randrange(1, 4))
        elif action < 0.75:
            harness.core.grammars.take()
        else:
            harness.answer()
        harness.core.scheduler.check_invariants()
    harness.run_to_the_end()
    assert not harness.grammars.open_grammars
    return harness


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("accuracy", [0.0, 0.8, 1.0])
def test_random_operations_with_drafts_keep_grammars_in_step_with_tokens(seed: int, accuracy: float) -> None:
    run_random_grammars(seed, 400, accuracy)


@pytest.mark.parametrize("accuracy", [0.0, 0.9, 1.0])
def test_a_draft_that_breaks_a_grammar_ends_there(accuracy: float) -> None:
    harness = GrammarHarness(grammar_timeout_s=600.0, steps_in_flight=1, block_size=4)
    proposer = Adversary(random.Random(1), accuracy, harness.right_tokens)
    harness.proposer = harness.core.scheduler.drafting.proposer = proposer
    for key in range(4):
        harness.ask(key, [1, 2, key], 40, f"{[3, 50, 7, 20][key]},{[30, 17, 60, 60][key]}")
    harness.run_to_the_end()
    worker = harness.worker
    assert worker.num_drafts > 20 and worker.num_accepted < worker.num_drafts, "a grammar ends within a draft"
    assert (worker.num_accepted > 10) == (accuracy > 0)


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_keep_grammars_in_step_with_tokens(seed: int) -> None:
    run_random_grammars(seed, 400)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_100_000_random_operations_keep_grammars_in_step_with_tokens() -> None:
    for seed in range(100, 200):
        run_random_grammars(seed, 1000)
