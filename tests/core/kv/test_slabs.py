"""Groups share a memory by slabs: no byte has two owners, and the longest unused goes first."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tokenloom.core.kv.block_pool import BlockPool
from tokenloom.core.kv.hit_rule import longest_hit
from tokenloom.core.kv.slab_pool import SlabPool
from tokenloom.core.kv.slabs import Slabs
from tokenloom.core.kv.tables import WindowTable
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.tests.support.today import seeds


def new_slabs(shape: PoolShape, floors: list[int]) -> tuple[Slabs, list[SlabPool]]:
    pools = [SlabPool(shape, group=group) for group in range(len(shape.block_bytes))]
    return Slabs(shape, pools, floors), pools


def check(slabs: Slabs, shape: PoolShape, pools: list[SlabPool], held: list[list[int]]) -> None:
    slabs.check_invariants()
    for pool, blocks in zip(pools, held, strict=True):
        pool.check_invariants([blocks])
    spans = sorted(
        (block * size, (block + 1) * size)
        for size, blocks in zip(shape.block_bytes, held, strict=True)
        for block in {*blocks}
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "two groups have the same byte"
    assert not spans or spans[0][0] >= shape.slab_bytes, "a null block is used"


@pytest.mark.parametrize("seed", seeds(12, 188))
def test_any_order_of_operations_keeps_bytes_disjoint_and_allocates_what_fits(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([3, 4, 5, 7, 10, 64]) for _ in range(rng.randrange(1, 4))]
    shape = PoolShape(rng.randrange(8, 24), max(sizes) * rng.randrange(2, 6), tuple(sizes))
    slabs, pools = new_slabs(shape, [rng.randrange(3) for _ in sizes])
    held = [list[int]() for _ in sizes]
    num_refused = num_keys = 0
    for _ in range(300):
        group, action = rng.randrange(len(sizes)), rng.random()
        pool = pools[group]
        slabs.advance()
        if action < 0.5:
            counts = [rng.randrange(max(pool.num_blocks // 6, 2)) for pool in pools]
            is_fitting = slabs.num_missing(counts) <= 0
            found = slabs.allocate(counts)
            assert (found is not None) == is_fitting
            num_refused += found is None
            for blocks, each, other in zip(found or [], held, pools, strict=False):
                each += blocks
                for block in blocks:
                    num_keys += 1
                    if rng.random() < 0.8:
                        other.cache_block(block, b"%d" % num_keys)
            assert found is None or [len(blocks) for blocks in found] == counts
        elif action < 0.9:
            released = [rng.sample(blocks, rng.randrange(len(blocks) + 1)) for blocks in held]
            counts = [rng.randrange(max(pool.num_blocks // 3, 2)) for pool in pools]
            unreferenced = [
                [block for block in {*blocks} if blocks.count(block) == pool.ref_count(block)]
                for pool, blocks in zip(pools, released, strict=True)
            ]
            num_missing = slabs.num_missing(counts, unreferenced)
            for pool, blocks, each in zip(pools, released, held, strict=True):
                pool.free(blocks)
                pool.demote(block for block in blocks if rng.random() < 0.3)
                for block in blocks:
                    each.remove(block)
            assert slabs.num_missing(counts) == num_missing, "a release brings other blocks than was said"
        elif action < 0.98 and pool.keys:
            block = pool.lookup(rng.choice(pool.keys))
            assert block is not None
            counts, taken = [0] * len(pools), [list[int]() for _ in pools]
            taken[group] = [block] * (not pool.ref_count(block))
            num_missing = slabs.num_missing(counts, None, taken)
            pool.touch([block])
            held[group].append(block)
            assert slabs.num_missing(counts) == num_missing
        elif not any(held):
            for pool in pools:
                pool.clear_index()
            slabs.reset()
        check(slabs, shape, pools, held)
    assert num_refused < 250


def test_a_slab_goes_to_another_group_when_it_is_used_longest_ago_and_never_below_a_floor() -> None:
    slabs, (full, window) = new_slabs(PoolShape(7, 4, (1, 2)), [1, 1])
    (old, _), (new, _) = slabs.allocate([12, 0]), slabs.allocate([8, 0])
    for step, blocks in enumerate((old, new)):
        slabs.advance()
        for block in blocks:
            full.cache_block(block, b"%d %d" % (step, block))
        full.free(blocks)
    slabs.advance()
    assert full.num_slabs == 5
    (_, held) = slabs.allocate([0, 3])
    assert window.num_slabs == 2 and full.num_cached == 16, "the window takes a slab that was used first"
    assert all(full.lookup(b"1 %d" % block) for block in new)
    for block in held[:2]:
        window.cache_block(block, b"%d" % block)
    window.free(held)
    slabs.advance()
    (_, again) = slabs.allocate([0, 2])
    assert held[2] in again and window.num_slabs == 2, "first the empty blocks of its own"
    assert slabs.num_missing([0, 8]) == 0 and slabs.num_missing([0, 9]) == 1
    assert slabs.allocate([0, 9]) is None and slabs.allocate([0, 8]) is not None and full.num_slabs == 1


def test_blocks_of_slabs_in_use_are_reused_before_those_of_idle_ones() -> None:
    shape = PoolShape(7, 4, (4, 1))
    slabs, pools = new_slabs(shape, [1, 0])
    window = pools[1]
    (_, blocks) = slabs.allocate([0, 20]) or []
    for block in blocks:
        window.cache_block(block, b"%d" % block)
    by_slab = [blocks[i : i + 4] for i in range(0, 20, 4)]
    window.free(by_slab[0])  # idle, demoted first
    window.demote(by_slab[0])
    for each, num_left in zip(by_slab[1:], (1, 2, 3, 2), strict=True):
        slabs.advance()
        window.free(each[:num_left])
    window.demote([*by_slab[1], *by_slab[2]])
    (_, found) = slabs.allocate([0, 3])
    assert sorted(found) == sorted([by_slab[1][0], *by_slab[2][:2]]), "demoted ones, the fullest slab first"
    (_, found) = slabs.allocate([0, 2])
    assert {*found} <= {*by_slab[3][:3]}, "then the older half of the others, although they have content of use"
    assert window.num_idle == 1 and slabs.num_missing([1, 0]) <= 0
    check(slabs, shape, pools, [[], [block for block in blocks if window.ref_count(block)]])


@pytest.mark.parametrize("used_first", [0, 1, 2])
def test_of_all_groups_the_blocks_that_were_used_longest_ago_make_room(used_first: int) -> None:
    slabs, pools = new_slabs(PoolShape(7, 2, (1, 1, 1)), [1, 1, 1])
    held = slabs.allocate([4, 4, 4])
    for i in range(3):
        group = (used_first + i) % 3
        slabs.advance()
        for block in held[group]:
            pools[group].cache_block(block, b"%d" % block)
        pools[group].free(held[group])
    assert slabs.allocate([0, 0, 1])
    assert [pool.num_cached for pool in pools] == [[2, 4, 4], [4, 2, 4], [4, 4, 3]][used_first]


@pytest.mark.parametrize(("floors", "has_room"), [([6, 2], True), ([0, 0], False)])
def test_a_row_that_is_spread_over_all_slabs_leaves_the_floors(floors: list[int], *, has_room: bool) -> None:
    slabs, (full, window) = new_slabs(PoolShape(11, 4, (1, 2)), floors)
    own, others = list[int](), list[int]()
    while (found := slabs.allocate([4, 0])) is not None:
        own.append(found[0][0])
        others += found[0][1:]
    full.free(others)
    assert full.num_idle == 0 and full.num_slabs == 10 - floors[1], "the oldest row has a block in each slab"
    assert full.num_free >= 20 and (slabs.allocate([9, 4]) is not None) == has_room
    assert window.num_used == 4 * has_room


@pytest.mark.parametrize("seed", seeds(60, 2000))
def test_the_hit_is_the_largest_boundary_at_which_every_group_has_what_it_needs(seed: int) -> None:
    rng = random.Random(seed)
    num_readable, num_groups = rng.randrange(40), rng.randrange(1, 5)
    needs = [rng.choice([None, None, 1, 2, 5, 9])] + [rng.choice([None, 1, 2, 3, 7, 50]) for _ in range(num_groups - 1)]
    share = rng.choice([0.5, 0.9, 0.97])
    there = [[rng.random() < share for _ in range(num_readable)] for _ in needs]
    asked = set[tuple[int, int]]()

    def has(group: int, i: int) -> bool:
        assert (group, i) not in asked, "a block is looked up twice"
        asked.add((group, i))
        return there[group][i]

    def fits(end: int, groups: int) -> bool:
        return all(all(there[g][max(end - (end if n is None else n), 0) : end]) for g, n in enumerate(needs[:groups]))

    hit = longest_hit(num_readable, needs, has)
    assert hit.num_blocks == max(end for end in range(num_readable + 1) if fits(end, num_groups))
    assert hit.deepest == max(end for end in range(num_readable + 1) if fits(end, 1))
    assert sum(hit.num_unusable) == hit.deepest - hit.num_blocks


def test_a_prompt_without_a_hit_is_not_searched_block_by_block() -> None:
    asked = list[int]()
    assert longest_hit(8192, [256], lambda group, i: asked.append(i) is not None).num_blocks == 0
    assert len(asked) == 8192 / 256


@pytest.mark.parametrize("block_size", [1, 5, 16, 32, 100])
def test_a_long_answer_holds_its_window_and_frees_other_blocks_to_be_reused_first(block_size: int) -> None:
    pool, window, kept = BlockPool(-(-63 // block_size) + 8), 64, 4
    table = WindowTable(pool, window, block_size, kept=(kept,))
    for position in range(8192):
        if position % block_size == 0:
            if i := position // block_size:
                pool.cache_block(table.block_ids[i - 1], b"%d" % (i - 1))
            table.leave(position - 1)
            table.block_ids += pool.allocate(1) or ()
        assert table.num_left * block_size <= max(position - window, 0), "a block left that a rewound row sees"
        assert sum(map(bool, table.block_ids)) == len(table.held) <= -(-63 // block_size) + 2
    needed = range(max(kept - -(-63 // block_size), 0), kept)
    assert all(pool.lookup(b"%d" % i) for i in [*needed][-2:]), "a kept boundary needs them"
    assert pool.lookup(b"%d" % kept) is None


class Evictions:
    """The keys of evicted blocks, with whether they were demoted."""

    def __init__(self) -> None:
        self.seen = dict[bytes, bool]()

    def evicted(self, group: int, block: int, key: bytes, *, is_demoted: bool = False) -> None:
        self.seen[key] = is_demoted

    def written(self, group: int, block: int, key: bytes) -> None:
        pass

    forgotten = written

    def cleared(self, group: int) -> None:
        pass


@pytest.mark.parametrize("takes_slab", [False, True])
def test_an_observer_learns_which_evicted_blocks_were_demoted(takes_slab: bool) -> None:
    shape, evictions = PoolShape(2, 4, (2, 1)), Evictions()
    pools = [SlabPool(shape, [evictions], group) for group in range(2)]
    slabs = Slabs(shape, pools, [0, 0])
    _, blocks = slabs.allocate([0, 4]) or []
    for block in blocks:
        pools[1].cache_block(block, b"%d" % block)
    pools[1].free(blocks)
    pools[1].demote(blocks[1:3])
    assert slabs.allocate([2, 0] if takes_slab else [0, 4])
    assert evictions.seen == {b"%d" % block: block in blocks[1:3] for block in blocks}
