"""Costs and chances are learned, and the choice is the best of them."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tokenloom.core.features.speculation.choice import DraftChoice
from tokenloom.core.features.speculation.lookup import LookupProposer
from tokenloom.core.features.speculation.own_index import Match
from tokenloom.core.features.speculation.step_costs import StepCosts
from tokenloom.core.features.speculation.survival import Survival
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.spec.config.speculation import SpeculationOptions, speculation_options
from tokenloom.tests.core.fake_cache import STATE
from tokenloom.tests.core.harness import Harness

PHRASE = [random.Random(1).randrange(997) for _ in range(20)]


def test_unknown_sizes_cost_little_and_known_ones_what_they_took() -> None:
    costs = StepCosts()
    assert costs.plain_s(1) is None
    for _ in range(30):
        costs.on_step(1, 0, 0.010)
    assert costs.plain_s(1) == pytest.approx(0.010)
    assert costs.seconds(1, 15)[15] < 0.014
    for _ in range(30):
        costs.on_step(1, 7, 0.024)
    assert costs.seconds(1, 7)[7] == pytest.approx(0.024)
    assert costs.seconds(1, 7) == sorted(costs.seconds(1, 7))
    assert costs.plain_s(8) is None, "other batches are other steps"


def test_the_time_of_a_step_falls_soon_and_rises_slowly() -> None:
    costs = StepCosts()
    for _ in range(10):
        costs.on_step(1, 0, 0.010)
    costs.on_step(1, 0, 0.100)
    assert (costs.plain_s(1) or 0) < 0.020


def test_chances_follow_what_came() -> None:
    survival, match = Survival(), Match("own", 3, list(range(8)))
    for _ in range(200):
        survival.learn(match, "one", 2, is_wrong=True)
    chances = survival.products(match, "another")
    assert chances[1] > 0.9 and chances[2] < 0.1 and chances == sorted(chances, reverse=True)


def test_a_request_whose_drafts_are_wrong_gets_smaller_chances_than_others() -> None:
    survival, match = Survival(), Match("own", 8, [1] * 8)
    for _ in range(5):
        survival.learn(match, "one", 0, is_wrong=True)
    assert survival.products(match, "one")[0] < 0.7 * survival.products(match, "another")[0]
    survival.forget("one")
    assert survival.products(match, "one") == survival.products(match, "another")


class Timed(Harness):
    """A core with steps of a given time, and a worker that says one phrase again and again."""

    def __init__(self, steps_in_flight: int = 1, *, has_state: bool = False) -> None:
        options: dict[str, Any] = {"steps_in_flight": steps_in_flight, "block_size": 16, "num_blocks": 400}
        if has_state:
            options |= {"windows": (None, STATE), "pool": PoolShape(60, 64, (2, 64))}
        super().__init__(speculation="lookup", **options)
        self.worker.next_token = lambda history, seed, adapter: PHRASE[len(history) % len(PHRASE)]
        self.clock_s = self.step_s = self.token_s = 0.0
        proposer = self.core.scheduler.batches.drafting.proposer
        assert isinstance(proposer, LookupProposer)
        proposer.clock = lambda: self.clock_s

    def run_timed(self, step_s: float, token_s: float) -> None:
        self.step_s, self.token_s = step_s, token_s
        self.run()

    def answer(self) -> None:
        if (entry := self.core.scheduler.ledger.oldest) is not None:
            self.clock_s += self.step_s + self.token_s * entry.batch.num_tokens
        super().answer()


@pytest.mark.parametrize(("step_s", "token_s", "pays"), [(0.010, 0.0001, True), (0.0001, 0.010, False)])
@pytest.mark.parametrize("has_state", [False, True])
def test_drafts_are_sent_where_their_cost_pays(step_s: float, token_s: float, pays: bool, *, has_state: bool) -> None:
    harness = Timed(has_state=has_state)
    harness.add(0, PHRASE * 2, 200)
    harness.run_timed(step_s, token_s)
    worker = harness.worker
    assert harness.finished[0].reason == "length" and len(harness.tokens[0]) == 200
    assert harness.tokens[0] == [PHRASE[(40 + i) % 20] for i in range(200)]
    if pays:
        assert worker.num_accepted > 120 and worker.num_steps < 80
        finished = harness.finished[0]
        assert 0 < finished.num_accepted_drafts <= finished.num_drafts == worker.num_drafts
    else:
        assert worker.num_steps > 150, "drafts were sent to learn their cost, and no more"


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_drafts_go_on_for_ever_where_they_pay(steps_in_flight: int) -> None:
    """Request after request: no choice that is made to learn a cost is the last one."""
    harness = Timed(steps_in_flight)
    shares = []
    for key in range(25):
        before = harness.worker.num_accepted
        harness.add(key, PHRASE * 2, 200)
        harness.run_timed(0.010, 0.0001)
        shares.append((harness.worker.num_accepted - before) / 200)
    assert min(shares[5:]) > 0.5, shares


def test_drafts_pay_less_where_accepted_tokens_are_computed_again() -> None:
    found = []
    for computes_twice in (False, True):
        choice = DraftChoice(16, computes_twice=computes_twice)
        for num_drafts in range(9):
            for _ in range(30):
                choice.costs.on_step(1, num_drafts, 0.010 + 0.004 * num_drafts)
        found.append([choice.pays([chance], 1) for chance in (0.3, 0.5, 0.8, 0.99)])
    assert found == [[False, True, True, True], [False, False, True, True]]


def test_the_options_of_other_engines_are_read() -> None:
    assert speculation_options("off") is None
    assert speculation_options("lookup") == SpeculationOptions()
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 5}
    assert speculation_options(config) == SpeculationOptions("ngram", 4, 3, 5)
    assert speculation_options({"model": "[ngram]", "num_speculative_tokens": 4}) is not None
    assert speculation_options({"method": "ngram", "model": "m"}) is not None
    assert speculation_options('{"method": "suffix", "suffix_decoding_max_tree_depth": 9}') is not None
    for wrong in (
        "on",
        "[]",
        '{"method": "eagle3"}',
        '{"method": "ngram", "num_speculative_tokens": 0}',
        '{"depth": 1}',
        '{"method": "draft_model"}',
        '{"model": "m", "num_speculative_tokens": 0}',
    ):
        with pytest.raises(ConfigError, match="--speculation"):
            speculation_options(wrong)


def test_a_draft_model_is_named_in_json_or_by_an_option() -> None:
    expected = SpeculationOptions("draft_model", 3, model="m", revision="r")
    named = {"model": "m", "num_speculative_tokens": 3, "revision": "r"}
    assert speculation_options(named) == speculation_options(named | {"method": "draft_model"}) == expected
    assert speculation_options("auto", "m", 3) == SpeculationOptions("draft_model", 3, model="m")
    assert speculation_options(named | {"method": "eagle3"}) == msgspec.structs.replace(expected, method="eagle3")
    assert speculation_options("mtp", None, 2) == SpeculationOptions("mtp", 2)
    assert speculation_options({"method": "qwen3_next_mtp", "num_speculative_tokens": 2}) == SpeculationOptions(
        "mtp", 2
    )
    for value in ("off", named):
        with pytest.raises(ConfigError, match="--draft-model other"):
            speculation_options(value, "other")
