"""Drafts change no token, under any schedule, and take nothing from a row without drafts."""

from __future__ import annotations

import random

import msgspec
import pytest

from tokenloom.core.features.tiers.options import OffloadOptions
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.process.arena import ArenaShape
from tokenloom.tests.core.adversary import Adversary
from tokenloom.tests.core.fake_worker import expected_tokens
from tokenloom.tests.core.harness import Harness, prompt_of

ACCURACIES = [0.0, 0.8, 1.0]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("accuracy", ACCURACIES)
def test_drafts_change_no_token(accuracy: float, steps_in_flight: int) -> None:
    adversary = Adversary(random.Random(0), accuracy)
    harness = Harness(proposer=adversary, steps_in_flight=steps_in_flight, num_blocks=200)
    for key in range(6):
        harness.add(key, [1, 2, key], 40)
    harness.run_to_the_end()
    worker = harness.worker
    assert worker.num_drafts > 50
    assert (worker.num_accepted > 0) == (accuracy > 0) and (worker.num_accepted < worker.num_drafts) == (accuracy < 1)
    if accuracy == 1:
        assert worker.num_steps < 25, "fewer steps than tokens"


def test_drafts_preempt_nobody() -> None:
    """In a pool that holds all answers and not one block more, no draft takes a block that a row needs."""
    for seed in range(6):
        adversary = Adversary(random.Random(seed), 0.0)
        harness = Harness(proposer=adversary, block_size=2, num_blocks=1 + 4 * 12, max_num_seqs=4)
        for key in range(4):
            harness.add(key, prompt_of(random.Random(key), 4), 20)
        while harness.core.num_requests:
            harness.turn()
            harness.core.scheduler.check_invariants()
        assert harness.core.scheduler.num_preemptions == 0
        assert harness.worker.num_drafts > 0


def test_blocks_of_drafts_go_to_tiers_with_known_tokens_only() -> None:
    for seed in range(4):
        options = OffloadOptions(ArenaShape(40, (1,), (1024,)), 4, "cpu", b"{}", 1.0, is_host_tier=True)
        harness = Harness(proposer=Adversary(random.Random(seed), 0.7), tiers=options, num_blocks=24, seed=seed)
        for key in range(8):
            harness.add(key, prompt_of(random.Random(key % 3), 20), 30)
        harness.run_to_the_end()
        assert harness.worker.num_accepted > 0


@pytest.mark.parametrize(
    ("count", "changed"), [(4, 1), (3, 0), (17, None)], ids=["another token", "the first is another", "too many"]
)
def test_a_result_that_does_not_fit_its_drafts_is_refused(count: int, changed: int | None) -> None:
    harness = Harness(proposer=Adversary(random.Random(5), 1.0), steps_in_flight=1)
    harness.add(0, [1, 2, 3], 60)
    while not harness.worker.queue or not harness.worker.queue[0].drafts:
        harness.answer()
        harness.core.step()
    result = harness.worker.answer()
    assert result is not None
    tokens = expected_tokens([1, 2, 3], 0, 60, [])[len(harness.tokens[0]) :][:count]
    if changed is not None:
        tokens[changed] += 1
    bad = msgspec.structs.replace(result, counts=encode_ids([count]), token_ids=encode_ids(tokens))
    with pytest.raises(ProtocolError, match="row 0 brought the tokens"):
        harness.core.on_result(bad)
