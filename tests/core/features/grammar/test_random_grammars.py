"""Any order of adds, aborts, late answers and losses keeps grammars in step with tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import ClassVar

import pytest

from tokenloom.core.features.grammar.manager import LATE_S
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.core import ConstraintBegin
from tokenloom.tests.core.fake_cache import STATE
from tokenloom.tests.core.fake_worker import expected_tokens
from tokenloom.tests.core.features.grammar.grammar_harness import GrammarHarness, expected_with_grammar
from tokenloom.tests.core.harness import prompt_of
from tokenloom.tests.core.random_operations import RandomOperations
from tokenloom.tests.support.today import seeds


class GrammarOperations(RandomOperations):
    """Late answers and masks, a lost helper and lost workers; for some seeds with windows, or with states, which cannot
    be taken back. accuracy: of drafts; None: there are none."""

    weights: ClassVar[dict[str, float]] = {
        "add": 12,
        "abort": 2,
        "lose_host": 1,
        "lose_worker": 0.5,
        "step": 25,
        "work": 20,
        "take": 15,
        "answer": 25,
    }
    share_of_begins = 0.5  # of the grammars, those that constrain parts of answers
    share_of_triggers = 0.5  # of the others, those whose parts begin at any of many tokens, and may end at once
    harness: GrammarHarness

    def __init__(self, seed: int, record: Path, accuracy: float | None = None) -> None:
        self.now, self.num_lost_helpers = 0.0, 0
        windows = (None, (None, 6), (None, STATE))[seed // 3 % 3]
        more = {"windows": windows, "pool": PoolShape(260, 1, (1, 1))} if windows else {}
        super().__init__(seed, record, GrammarHarness, monotonic=lambda: self.now, grammar_timeout_s=600.0, **more)
        if accuracy is not None:
            self.harness.give_adversary(self.rng, accuracy)

    def check(self) -> None:
        super().check()
        self.now += self.rng.choice([0.0] * 9 + [LATE_S])  # for which a step waits

    def add_request(self, key: int) -> None:
        rng = self.rng
        prompt, max_tokens = prompt_of(rng, rng.randrange(1, 30)), rng.randrange(1, 40)
        if rng.random() < 0.3:
            self.harness.add(key, prompt, max_tokens)
            return
        text = f"{rng.choice([1, 3, 50, 990, 993])},{rng.randrange(1, 40)}"
        stop = prompt_of(rng, rng.choice([0, 0, 2]))
        begins, triggers, repeats = list[ConstraintBegin](), list[int](), False
        if rng.random() < self.share_of_begins:
            max_tokens, repeats = rng.randrange(1, 80), rng.random() < 0.7
            text, begins = self.draw_begins(prompt, key)
        elif rng.random() < self.share_of_triggers:
            max_tokens, repeats = rng.randrange(1, 80), True
            text, triggers = f"{rng.choice([1, 3, 50])},{rng.choice([3, 9, 30])},1,2", prompt_of(rng, 100)
            if rng.random() < 0.5:  # they count behind the end of a thought
                begins = [ConstraintBegin(token_ids=encode_ids([token])) for token in prompt_of(rng, 50)]
        outputs = expected_with_grammar(
            text, prompt, key, max_tokens, stop, begins, repeats=repeats, triggers=triggers
        )[0]
        outputs = outputs[: rng.choice([0, 0, rng.randrange(1 + max_tokens)])]
        fields = {
            "constraint_begins": begins,
            "constraint_triggers": encode_ids(triggers),
            "constraint_repeats": repeats,
        }
        self.harness.ask(key, prompt, max_tokens, text, stop=stop, outputs=outputs, **fields)

    def draw_begins(self, prompt: list[int], seed: int) -> tuple[str, list[ConstraintBegin]]:
        """Return a grammar, and begins that are frequent, of which some have several tokens."""
        rng, width = self.rng, self.rng.choice([1, 1, 2, 3])
        free = expected_tokens(prompt, seed, 80, [])
        found = [free[i : i + rng.randrange(1, width + 1)] for i in (rng.randrange(40) for _ in range(3))]
        found += [[token] for token in prompt_of(rng, rng.choice([0, 50, 200]))]
        frames, is_included = sorted({encode_ids(each) for each in found}), rng.random() < 0.5
        begins = [ConstraintBegin(token_ids=each, is_included=is_included) for each in frames]
        length = rng.choice([1, 2, 4, 9, 30])
        return f"{rng.choice([1, 3, 50, 990, 993])},{max(length, width)},{width * is_included}", begins

    def lose_host(self) -> None:
        if not self.num_lost_helpers:
            self.num_lost_helpers += 1
            self.harness.grammars.die()

    def lose_worker(self) -> None:
        if self.harness.generation < 2:
            super().lose_worker()

    def work(self) -> None:
        self.harness.grammars.work(self.rng.randrange(1, 4))

    def take(self) -> None:
        self.harness.core.grammars.take()

    def end(self) -> None:
        super().end()
        assert not self.harness.grammars.open_grammars


@pytest.mark.parametrize("seed", seeds(5, 195))
def test_random_operations_keep_grammars_in_step_with_tokens(seed: int, tmp_path: Path) -> None:
    GrammarOperations(seed, tmp_path / "blocks").run(400)


@pytest.mark.parametrize("seed", seeds(4, 96))
def test_random_operations_with_drafts_keep_grammars_in_step_with_tokens(seed: int, tmp_path: Path) -> None:
    GrammarOperations(seed, tmp_path / "blocks", accuracy=(0.0, 0.8, 1.0)[seed % 3]).run(400)


@pytest.mark.parametrize("accuracy", [0.0, 0.9, 1.0])
def test_a_draft_that_breaks_a_grammar_ends_there(accuracy: float) -> None:
    harness = GrammarHarness(grammar_timeout_s=600.0, steps_in_flight=1)
    harness.give_adversary(random.Random(1), accuracy)
    for key in range(4):
        harness.ask(key, [1, 2, key], 40, f"{[3, 50, 7, 20][key]},{[30, 17, 60, 60][key]}")
    harness.run_to_the_end()
    worker = harness.worker
    assert worker.num_drafts > 20 and worker.num_accepted < worker.num_drafts, "a grammar ends within a draft"
    assert (worker.num_accepted > 10) == (accuracy > 0)
