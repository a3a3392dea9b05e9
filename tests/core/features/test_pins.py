"""Prompts that ask for it stay cached before others for their time, within the part of their key."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from tokenloom.core.features.pins import SHARE, Pins
from tokenloom.core.kv.kept_last import KeptLast
from tokenloom.ipc.messages.core import TenantRef
from tokenloom.tests.core.harness import Harness, prompt_of
from tokenloom.tests.support.today import seeds

A, B = TenantRef(name="a"), TenantRef(name="b", weight=3.0)
SIZE = 4


class Kept:
    """A core, and prompts that push others out of its cache."""

    def __init__(self, num_blocks: int = 101) -> None:
        self.now = 1000.0
        self.harness = Harness(num_blocks, monotonic=lambda: self.now, max_num_seqs=4)
        self.rng = random.Random(0)
        self.num_requests = 0

    def ask(self, prompt: list[int], retention: str | None = None, tenant: TenantRef | None = None) -> int:
        """Run a request; return how many tokens it found."""
        self.num_requests += 1
        self.harness.add(self.num_requests, prompt, 2, tenant=tenant, prompt_cache_retention=retention)
        self.harness.run()
        self.harness.core.scheduler.check_invariants()
        return self.harness.cached[self.num_requests]

    def flood(self) -> None:
        """Fill the pool twice."""
        for _ in range(2 * self.harness.num_blocks // 10):
            self.ask(prompt_of(self.rng, 40))

    def later(self, seconds: float) -> None:
        while seconds > 0:  # the clock takes a longer gap for a suspension
            self.now += min(seconds, 0.4)
            seconds -= 0.4
            self.harness.core.features.expire(self.harness.core.look())


def test_a_pinned_prompt_outlasts_a_flood_until_its_time_is_over() -> None:
    kept, prompt, other = Kept(), [7] * 41, [9] * 41
    kept.ask(prompt, "5m")
    kept.ask(other)
    for _ in range(3):  # each use begins the time again
        kept.later(200)
        kept.flood()
        assert kept.ask(prompt, "5m") == 40
    assert kept.ask(other) == 0
    for _ in range(130):  # old ends of a pin's time are forgotten, see check_invariants
        kept.ask(prompt, "5m")
    kept.later(301)
    kept.flood()
    assert kept.ask(prompt) == 0


def test_pins_have_no_more_than_the_part_of_their_key_and_hold_nobody_up() -> None:
    kept = Kept()
    for number in range(20):
        kept.ask([number + 1] * 40, "24h", A)
    assert len(pins_of(kept)._tenant_by_key) == SHARE * 100
    assert kept.ask([1] * 41) == 0 and kept.ask([20] * 41) == 40, "the oldest pins have gone"
    kept.ask([50] * 40, "1h", B)
    pins = pins_of(kept)._pins
    assert [len(each) for each in pins.values()] == [12, 10]
    kept.harness.add(999, [60] * 200, 8, tenant=A)  # needs more than all others leave
    kept.harness.add(1000, [61] * 180, 8)
    kept.harness.run()
    assert {999, 1000} <= set(kept.harness.finished)
    kept.harness.core.reset_prefix_cache()
    assert not pins_of(kept)._tenant_by_key


def pins_of(kept: Kept) -> Pins:
    (pins,) = (each for each in kept.harness.core.features.in_order if isinstance(each, Pins))
    return pins


@pytest.mark.parametrize("seed", seeds(5, 50))
def test_kept_blocks_are_reused_after_all_others_in_order_of_time(seed: int) -> None:
    rng = random.Random(seed)
    blocks, kept, model, now = KeptLast(OrderedDict[int, int]()), set[int](), dict[int, int](), 0
    for _ in range(400):
        block, now = rng.randrange(30), now + 1
        action = rng.choice(["free", "use", "keep", "release", "reuse"])
        if action == "free" and block not in model:
            blocks[block] = model[block] = now
        elif action == "use":
            assert blocks.pop(block, None) == model.pop(block, None)
        elif action == "keep":
            if block in model and block not in kept:  # as if it were used now
                model[block] = stamp = blocks.get(block, -1)
                model[block] = model.pop(block)
                assert stamp > 0
            blocks.keep(block)
            kept.add(block)
        elif action == "release":
            if block in model and block in kept:
                model[block] = model.pop(block)
            blocks.release(block)
            kept.discard(block)
        elif action == "reuse" and model:
            first = next((each for each in model if each not in kept), next(iter(model)))
            assert blocks.popitem(last=False) == (first, model.pop(first))
        assert len(blocks) == len(model) and dict(blocks.items()) == model
        assert [*blocks] == sorted(model, key=lambda each: each in kept)
