"""An observer of the pool sees every change of cached content, in time for a copy elsewhere."""

from __future__ import annotations

import random

import pytest

from tokenloom.core.kv.block_pool import BlockPool
from tokenloom.tests.core.harness import Harness, prompt_of


class Mirror:
    """The content of the blocks as far as events tell."""

    def __init__(self) -> None:
        self.key_by_block: dict[int, bytes] = {}
        self.num_evicted = 0

    def written(self, group: int, block: int, key: bytes) -> None:
        assert group == 3 and block not in self.key_by_block
        self.key_by_block[block] = key

    def evicted(self, group: int, block: int, key: bytes, *, is_demoted: bool = False) -> None:
        assert group == 3 and self.key_by_block.pop(block, key) == key
        self.num_evicted += 1

    def cleared(self, group: int) -> None:
        assert group == 3
        self.key_by_block.clear()


@pytest.mark.parametrize("seed", range(6))
def test_an_observer_knows_the_index_less_the_blocks_that_are_not_written_yet(seed: int) -> None:
    rng, mirror = random.Random(seed), Mirror()
    pool = BlockPool(20, [mirror], group=3)
    held: list[int] = []
    steps: list[list[tuple[int, bytes]]] = []
    for number in range(400):
        action = rng.random()
        if action < 0.4 and (blocks := pool.allocate(rng.randrange(1, 4))) is not None:
            held += blocks
            for block in blocks:
                pool.cache_block(block, number.to_bytes(4, "little") + bytes([block]))
            steps.append(pool.take_pending())
        elif action < 0.7 and held:
            pool.free([held.pop(rng.randrange(len(held)))])
        elif action < 0.95 and steps:
            pool.mark_written(steps.pop(0))
        elif action > 0.98 and not held:
            pool.clear_index()
            steps.clear()
        pending = {block for step in steps for block, _ in step}
        for block, key in mirror.key_by_block.items():
            assert pool.lookup(key) == block
        for block in held:
            assert block in pending or block in mirror.key_by_block
    assert mirror.num_evicted > 20


def test_steps_name_the_group_of_each_block() -> None:
    harness, rng = Harness(), random.Random(0)
    harness.add(0, prompt_of(rng, 9))
    harness.run()  # the fake worker refuses blocks of other groups than 0
    harness.check(0)
