"""Rows with a state leave snapshots where other requests are likely to begin, and hold few blocks."""

from __future__ import annotations

import random

import pytest

from tokenloom.core.kv.block_pool import BlockPool
from tokenloom.core.kv.state_table import StateTable
from tokenloom.core.scheduling.drafting import Proposer
from tokenloom.core.scheduling.prefill_throttle import PrefillThrottle
from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.spec.kv.kv_groups import KVGroup, num_held
from tokenloom.tests.core.adversary import Adversary
from tokenloom.tests.core.fake_cache import STATE
from tokenloom.tests.core.harness import Harness, prompt_of
from tokenloom.tests.core.shadow_batch import ShadowedWorker

BLOCK_SIZE, GROUP = 4, 1
POOL = PoolShape(60, 64, (2, 64))  # a block of states is as large as 32 blocks of keys


class StateHarness(Harness):
    new_worker = ShadowedWorker

    def __init__(self, num_slabs: int = 60, **options: object) -> None:
        pool = PoolShape(num_slabs, POOL.slab_bytes, POOL.block_bytes)
        super().__init__(windows=(None, STATE), pool=pool, **options)  # type: ignore[arg-type]

    @property
    def num_used(self) -> int:
        """Blocks of states that rows hold."""
        return self.core.scheduler.kv_cache.pools[GROUP].num_used

    def answer_to(self, key: int, prompt: list[int], max_tokens: int) -> list[int]:
        self.add(key, prompt, max_tokens)
        self.run()
        self.check(key)
        return self.tokens[key]


@pytest.mark.parametrize("max_tokens", range(1, 10))
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_conversation_is_found_up_to_its_last_whole_block(max_tokens: int, steps_in_flight: int) -> None:
    harness, prompt = StateHarness(steps_in_flight=steps_in_flight), prompt_of(random.Random(0), 41)
    for turn in range(3):
        answer = harness.answer_to(turn, prompt, max_tokens)
        known = [*prompt, *answer]
        prompt = known + prompt_of(random.Random(turn + 1), 6)
        harness.answer_to(100 + turn, prompt, 1)
        assert harness.cached[100 + turn] == (len(known) - 1) // BLOCK_SIZE * BLOCK_SIZE  # the last is not computed


def test_a_prefix_is_found_at_its_end_once_two_requests_had_it() -> None:
    rng = random.Random(0)
    harness, stem = StateHarness(max_num_batched_tokens=64, max_num_seqs=1), prompt_of(rng, 80)
    for key in range(4):
        harness.answer_to(key, stem + prompt_of(rng, 9), 1)
    assert harness.cached[0] == 0 and 0 < harness.cached[1] < 80, "no one expected that a request would begin there"
    assert harness.cached[2] == harness.cached[3] == 80
    assert harness.core.scheduler.kv_cache.num_unusable_tokens == [0, 80 - harness.cached[1]]


def test_a_row_holds_one_state_and_leaves_a_snapshot_at_each_boundary() -> None:
    harness = StateHarness(steps_in_flight=1)
    harness.add(1, prompt_of(random.Random(0), 10), 40)
    pool = harness.core.scheduler.kv_cache.pools[GROUP]
    num_cached = set[int]()
    while harness.core.num_requests:
        harness.turn()
        assert harness.num_used <= 1
        num_cached.add(pool.num_cached)
    assert max(num_cached) == 1 + 10, "at the prompt's last boundary and at those of the answer: the memory has room"
    assert harness.num_used == 0


def test_decoding_rows_take_their_old_snapshots_before_those_at_which_others_begin() -> None:
    """Of the memory 9 slabs are left for states: a row needs 2, and each prompt has left a snapshot at its end."""
    rng = random.Random(0)
    harness, prompts = StateHarness(num_slabs=12, max_num_seqs=1), [prompt_of(rng, 9) for _ in range(4)]
    for key, prompt in enumerate(prompts):
        harness.answer_to(key, prompt, 1)
    harness.answer_to(10, prompt_of(rng, 9), 200)
    for key, prompt in enumerate(prompts):
        harness.answer_to(20 + key, prompt, 1)
    assert [harness.cached[20 + key] for key in range(4)] == [8] * 4


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_n_answers_share_the_state_of_their_prompt(*, enable_prefix_caching: bool) -> None:
    harness = StateHarness(enable_prefix_caching=enable_prefix_caching)
    harness.add(1, prompt_of(random.Random(0), 30), 6, n=5)
    harness.run()
    for key in range(1, 6):
        harness.check(key)
    cache, num_followers = harness.worker.cache, 4
    assert cache.num_snapshots_read == num_followers
    assert harness.worker.num_computed_tokens <= 30 + num_followers * 2 + 5 * 6  # the prompt once, but for its last 2


def test_without_prefix_caching_a_lone_row_leaves_no_snapshot() -> None:
    harness = StateHarness(enable_prefix_caching=False)
    harness.add(1, prompt_of(random.Random(0), 30), 30)
    blocks = set[int]()
    while harness.core.num_requests:
        harness.turn()
        blocks.update(harness.worker.cache.live.values())
    assert len(blocks) == 1, "it stays in its block"


@pytest.mark.parametrize("num_outputs", range(1, 9))
def test_a_preempted_row_goes_on_from_its_newest_snapshot(num_outputs: int) -> None:
    harness, prompt = StateHarness(steps_in_flight=1), prompt_of(random.Random(0), 21)
    harness.add(1, prompt, 20)
    while len(harness.tokens[1]) < num_outputs:
        harness.turn()
    (request,) = harness.core.scheduler.rows.requests()
    num_computed = 20 + num_outputs
    assert harness.worker.num_computed_tokens == num_computed
    harness.core.scheduler.preempt(request)
    harness.run()
    harness.check(1)
    num_found = num_computed // BLOCK_SIZE * BLOCK_SIZE
    assert harness.worker.num_computed_tokens == 21 + 19 + num_computed - num_found


def test_a_result_without_a_token_is_refused_if_the_row_has_a_state() -> None:
    """The state has seen the row's last token: it cannot be computed again."""
    harness = StateHarness(steps_in_flight=1)
    assert isinstance(harness.worker, ShadowedWorker)
    harness.worker.batch, harness.worker.num_new_tokens = None, lambda: 0
    harness.add(1, prompt_of(random.Random(0), 9), 5)
    with pytest.raises(ProtocolError, match=r"rows \[\d+\] have a state and brought no token"):
        harness.turn()


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_tokens_before_drafts_are_computed_again_and_drafts_follow_them(accuracy: float) -> None:
    proposer: Proposer = Adversary(random.Random(0), accuracy)
    harness = StateHarness(proposer=proposer, steps_in_flight=1)
    harness.answer_to(1, prompt_of(random.Random(0), 30), 60)
    worker = harness.worker
    assert worker.num_drafts > 20 and worker.num_accepted == worker.num_drafts * accuracy
    num_plain = 30 + 60 - 1
    assert worker.num_computed_tokens > num_plain + worker.num_drafts, "tokens before the drafts, too"


class NoPrompts(PrefillThrottle):
    """Throttle that holds all prompt tokens back."""

    def limit(self, num_decodes: int, num_prompts: int, budget: int) -> int:
        return 0


def test_rows_that_compute_tokens_before_drafts_again_are_not_held_back_as_prompts() -> None:
    harness = StateHarness(proposer=Adversary(random.Random(0), 0.5), steps_in_flight=1)
    for key, max_tokens in enumerate((40, 400)):
        harness.add(key, prompt_of(random.Random(key), 20), max_tokens)
        harness.turn()
    harness.core.scheduler.prefill_throttle = NoPrompts()
    for _ in range(100):
        harness.turn()
        if len(harness.tokens.get(0, [])) == 40:
            break
    assert len(harness.tokens[0]) == 40 and harness.worker.num_drafts > 20


def test_a_block_that_has_been_reused_is_not_demoted() -> None:
    pool = BlockPool(9)
    table = StateTable(pool, BLOCK_SIZE, (), is_sharing=True)

    def move(position: int, reasons: list[str]) -> int:
        (block,) = pool.allocate(1) or [0]
        table.block_ids.append(0)
        table.plan(position, position + 1, [(position, block)])
        table.enter()
        pool.cache_block(block, b"%d" % position)
        assert table.release() == reasons
        return block

    first = move(0, [])
    move(4, ["newest"])
    blocks = pool.allocate(7) or ()
    assert first in blocks
    pool.cache_block(first, b"of another row")
    pool.now = 5
    pool.free(blocks)
    move(8, ["newest"])
    pool.allocate(5)  # all that are empty
    assert pool.oldest_stamp == 5, "the content of another row is as good as before"


def test_a_state_that_goes_on_in_its_block_is_found_no_more_and_one_that_others_read_moves() -> None:
    pool = BlockPool(9)
    table = StateTable(pool, BLOCK_SIZE, (), is_sharing=True)
    (live,) = pool.allocate(1) or [0]
    table.block_ids.append(0)
    table.plan(0, BLOCK_SIZE, [(0, live)])
    assert table.enter() == [(0, live)] and table.is_snapshot(BLOCK_SIZE)
    pool.cache_block(live, b"a")
    pool.touch([live])
    assert table.has_to_move(), "another row reads it"
    pool.free([live])
    assert not table.has_to_move() and pool.lookup(b"a") == live
    table.block_ids.append(0)
    table.plan(BLOCK_SIZE, BLOCK_SIZE + 1, [])
    assert pool.lookup(b"a") is None and table.enter() == []
    assert table.block_ids == [0, live] and table.held == [live]


def test_rows_fill_the_memory_with_states_and_leave_snapshots_only_where_there_is_room() -> None:
    num_slabs, num_rows = 24, 19
    harness, rng = StateHarness(num_slabs, max_num_seqs=num_rows, steps_in_flight=1), random.Random(0)
    for key in range(num_rows):
        harness.add(key, prompt_of(rng, 9), 14)
    most = 0
    while harness.core.scheduler.has_work():
        harness.turn()
        most = max(most, harness.num_used)
    for key in range(num_rows):
        harness.check(key)
    assert most >= 15 and harness.core.scheduler.num_preemptions == 0, "a fourth of the rows has a second block"


@pytest.mark.parametrize("seed", range(4))
def test_a_state_without_the_tokens_before_drafts_in_flight_is_not_found(seed: int) -> None:
    rng = random.Random(seed)
    harness, prompt = StateHarness(proposer=Adversary(rng, 0.0), steps_in_flight=1), prompt_of(rng, 9)
    harness.add(1, prompt, 100)
    rows = harness.core.scheduler.rows
    while True:
        harness.core.step()
        (row,) = (request.row for request in rows.requests())
        if rows.num_drafts[row] and rows.num_tokens[row] % BLOCK_SIZE == 0:
            break
        harness.answer()
    known = [*prompt, *harness.tokens[1]]
    assert len(known) == rows.num_tokens[row]
    harness.abort(1)
    harness.answer_to(2, [*known, *prompt_of(rng, 5)], 1)
    assert harness.cached[2] == len(known) - BLOCK_SIZE


def test_a_pool_has_floors_for_two_states_and_slabs_for_one() -> None:
    groups = [KVGroup(None, (0,), 1, 64), KVGroup(None, (1, 2), 0, 0, is_state=True)]
    assert num_held(groups, 1000, 64, 16) == [63, 2] and num_held(groups, 10, 64, 16) == [1, 1]
    assert [group.num_needed(7, 16) for group in groups] == [7, 1] and groups[1].num_needed(0, 16) == 0
    pool = PoolShape.of(100 << 20, [4 << 10, 5 << 20])
    assert pool.slab_bytes == 5 << 20 and pool.num_slabs_for([63, 2]) == 1 + 1 + 2
