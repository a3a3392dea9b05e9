"""Copies of a step, and fetches of a request, end with the step and with the request."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from tokenloom.core.features.tiers.options import OffloadOptions
from tokenloom.core.kv.block_hash import object_name
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.base import FinishReason
from tokenloom.ipc.messages.tier import STORE_ON_DISK
from tokenloom.ipc.process.arena import ArenaShape
from tokenloom.tests.core.fake_cache import STATE
from tokenloom.tests.core.features.tiers.settling import make_slow, settle
from tokenloom.tests.core.harness import Harness, prompt_of

SIZE, LENGTH = 4, 41


def new_harness(sources: int = 0) -> Harness:
    has_sources = bool(sources)
    sizes = {
        "arena": ArenaShape(200, (1,), (1024,)),
        "block_size": SIZE,
        "device": "cpu",
        "facts": b"{}",
        "token_s": 1.0,
    }
    tiers = OffloadOptions(is_host_tier=not has_sources, sources=sources, has_sources=has_sources, **sizes)  # type: ignore[arg-type]
    harness = Harness(30, tiers=tiers, block_size=SIZE, steps_in_flight=1)
    make_slow(harness, 1.0)
    settle(harness)
    return harness


def test_a_step_whose_result_makes_no_sense_is_lost_with_its_copies() -> None:
    harness, rng = new_harness(), random.Random(0)
    for key in range(9):
        harness.add(key, prompt_of(rng, LENGTH), 3)
    for _ in range(200):
        harness.core.step()
        entry = harness.core.scheduler.ledger.oldest
        if entry is not None and entry.copies is not None and len(entry.batch.sampled_rows):
            break
        harness.answer()
    assert entry is not None and entry.copies is not None, "no step has copies"
    result = harness.worker.answer()
    assert result is not None and harness.offload.slots.num_used
    with pytest.raises(ProtocolError):
        harness.core.on_result(msgspec.structs.replace(result, counts=encode_ids([1])))
    harness.lose_worker()
    harness.run_to_the_end()
    settle(harness)
    harness.core.scheduler.check_invariants()
    assert harness.offload.slots.num_used == 0, "slots leaked"


@pytest.mark.parametrize("reason", ["abort", None])
def test_the_fetch_of_a_request_ends_with_it(reason: FinishReason | None) -> None:
    harness, prompt = new_harness(STORE_ON_DISK), prompt_of(random.Random(0), LENGTH)
    harness.add(0, prompt, 3)
    harness.run_to_the_end()
    settle(harness)
    harness.core.reset_prefix_cache()
    harness.offload.slots.forget_all()
    harness.add(1, prompt, 3)
    assert harness.offload.fetches.num_waiting == 1
    if reason is None:  # another attempt takes its place, and fetches
        harness.add(1, prompt, 3, attempt=1)
        assert harness.offload.fetches.num_waiting == 1
    else:
        harness.abort(1)
        assert harness.offload.fetches.num_waiting == 0
    harness.core.scheduler.check_invariants()
    harness.run_to_the_end()


def test_a_preempted_request_looks_for_its_blocks_when_it_is_the_first_in_order() -> None:
    harness, prompt = new_harness(STORE_ON_DISK), prompt_of(random.Random(0), LENGTH)
    harness.add(0, prompt, 30)
    for _ in range(300):
        harness.now += 1.0
        harness.offload.tick(is_idle=True)
        harness.tier.act()
        if harness.tokens[0]:
            break
        harness.turn()
    (request,) = harness.core.open_requests
    assert request.row >= 0
    num_questions = harness.tier.num_questions
    harness.core.scheduler.preempt(request)
    assert not request.is_looked_up and not request.waits_for and harness.tier.num_questions == num_questions
    harness.core.step()
    assert request.is_looked_up
    harness.run_to_the_end()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("window", [6, STATE])
def test_the_last_blocks_of_an_answer_are_written_though_no_step_follows(steps_in_flight: int, window: int) -> None:
    arena = ArenaShape(64, (2, 1), (4096, 8192))
    tiers = OffloadOptions(arena, SIZE, "cpu", b"{}", 1.0, is_host_tier=False, sources=STORE_ON_DISK, has_sources=True)
    pool = PoolShape(200, 2, (1, 2))
    harness = Harness(windows=(None, window), pool=pool, tiers=tiers, steps_in_flight=steps_in_flight)
    harness.add(1, list(range(41)), 20)
    harness.run()
    for _ in range(30):
        harness.offload.tick(is_idle=True)
        harness.tier.act()
        harness.turn()
    tokens = np.array([*range(41), *harness.tokens[1]], np.int32)
    *keys, _ = harness.core.scheduler.kv_cache.prompt_keys(tokens.tobytes(), None, b"", [])
    assert len(keys) == 15, "60 of 61 tokens are computed"
    names = {name for _, name in harness.tier.objects}
    assert {object_name(keys[-1], group) for group in range(2)} <= names
