"""Requests with adapters in the core: slots in the queue's order, fairness, failures of fills, and losses."""

from __future__ import annotations

import itertools

import pytest

from tokenloom.core.engine import BEAT_S
from tokenloom.core.features.adapters.adapter_queue import MAX_OVERTAKES
from tokenloom.core.features.adapters.adapter_table import LEGAL_MOVES, AdapterSlot, AdapterTable, SlotState
from tokenloom.core.kv.block_hash import block_key, shared_root
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.messages.adapter import AdaptersProgress, SlotContent
from tokenloom.ipc.messages.base import Rank
from tokenloom.ipc.messages.workers import SlotFilled
from tokenloom.tests.core.fake_adapters import digest_of
from tokenloom.tests.core.harness import Harness

PROMPT = list(range(20))
START_TIMEOUT_S = 5.0


def new_harness(**options: object) -> Harness:
    settings: dict[str, object] = {"enable_lora": True, "max_loras": 2, **options}
    return Harness(**settings)  # type: ignore[arg-type]


class SlowFills:
    """A harness with a worker that fills slots only on `fill`, and the core's clock."""

    def __init__(self, **options: object) -> None:
        self._now = 0.0
        self.harness = new_harness(start_timeout_s=START_TIMEOUT_S, monotonic=lambda: self._now, **options)
        self.harness.fills_by_itself = False

    def let_pass(self, seconds: float, *, at_once: bool = False) -> None:
        """The core's loop turns while so much time passes, or only then."""
        steps = 1 if at_once else int(seconds / BEAT_S)
        for _ in range(steps):
            self._now += seconds / steps
            self.harness.core.adapters.expire(self.harness.awake_clock.look())
            self.harness.take()


def by_hand(**options: object) -> Harness:
    return SlowFills(**options).harness


def states(harness: Harness) -> list[SlotState]:
    return [slot.state for slot in harness.core.adapters.table.slots]


# ── admission to slots ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_runs_when_every_rank_holds_its_adapter() -> None:
    harness = by_hand(tensor_parallel_size=2)
    harness.add(1, PROMPT, 3, adapter=7)
    assert harness.core.step() == 1
    (step,) = harness.worker.queue
    assert step.rows == b"" and [(fill.slot, fill.digest, fill.folder) for fill in step.fills] == [
        (1, digest_of(7), "/store/7")
    ]
    harness.answer()
    harness.fill(Rank(0, 0))
    assert harness.core.step() == 0 and not harness.worker.queue, "a rank does not hold it"
    harness.fill(Rank(0, 1))
    harness.core.step()
    assert [row.adapter_slot for row in harness.worker.queue[0].new_rows] == [1]
    harness.run_to_the_end()


def test_others_go_on_while_an_adapter_is_loaded() -> None:
    harness = by_hand()
    harness.add(1, PROMPT, 30)
    harness.add(2, PROMPT, 5, adapter=1)
    harness.add(3, PROMPT, 5)
    harness.turns(10)
    assert len(harness.tokens[1]) > 5 and 3 in harness.finished and not harness.tokens[2]
    harness.run_to_the_end()


def test_a_slot_is_not_refilled_before_both_steps_in_flight_with_its_rows_are_done() -> None:
    harness = by_hand(max_loras=1, steps_in_flight=2)
    harness.add(1, PROMPT, 20, adapter=1)
    harness.turn()
    harness.fill_all()
    while len(harness.tokens[1]) < 3:
        harness.turn()
    harness.add(2, PROMPT, 2, adapter=2)
    harness.core.step()
    assert len(harness.worker.queue) == 2 and not any(step.fills for step in harness.worker.queue)
    harness.abort(1)
    harness.add(3, PROMPT, 9)  # so that there are steps to send
    num_fills = [harness.worker.adapters.num_begun]
    for _ in range(3):
        harness.answer()
        harness.core.step()
        num_fills.append(harness.worker.adapters.num_begun)
    assert num_fills == [1, 1, 2, 2], "the first step that may fill it follows the second result"
    harness.run_to_the_end()


def test_adapters_of_waiting_requests_are_loaded_ahead_of_free_rows_two_at_a_time_in_order() -> None:
    harness = by_hand(max_num_seqs=1, max_loras=3)
    harness.add(1, PROMPT, 30)
    for key, adapter in ((2, 5), (3, 6), (4, 5), (5, 7), (6, 8)):
        harness.add(key, PROMPT, 2, adapter=adapter)
    harness.turn()
    assert [slot.digest for slot in harness.core.adapters.table.filling] == [digest_of(5), digest_of(6)]
    harness.fill(Rank(0, 0))
    harness.turn()
    assert [slot.digest for slot in harness.core.adapters.table.filling] == [digest_of(6), digest_of(7)]
    harness.fill_all()
    harness.turn()
    assert states(harness) == [SlotState.READY] * 3, "adapter 8 is wanted behind those that wait for a row"
    harness.run_to_the_end()
    assert harness.worker.adapters.num_begun == 4, "each was loaded once"


def test_the_least_recently_used_adapter_without_requests_loses_its_slot() -> None:
    harness = new_harness()
    for key, adapter in enumerate((1, 2, 1, 3)):
        harness.add(key, PROMPT, 2, adapter=adapter)
        harness.run()
    assert [slot.digest for slot in harness.core.adapters.table.slots] == [digest_of(1), digest_of(3)]


def test_the_keys_of_the_base_model_do_not_depend_on_adapters() -> None:
    harness = new_harness()
    harness.add(1, PROMPT, 1)
    harness.run()
    kv_cache = harness.core.scheduler.kv_cache
    assert kv_cache.pool.lookup(block_key(kv_cache.namespace, encode_ids(PROMPT[:4]))) is not None
    assert shared_root(b"weights", None) == b"weights"
    roots = [shared_root(b"weights", salt, digest) for salt in (None, "a") for digest in (b"", b"1", b"2")]
    assert len(set(roots)) == 6


# ── fairness ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("max_loras", [1, 3])
def test_an_adapter_is_overtaken_a_bounded_number_of_times(max_loras: int, steps_in_flight: int) -> None:
    harness = new_harness(max_loras=max_loras, max_num_seqs=8, num_blocks=400, steps_in_flight=steps_in_flight)
    key = 0
    num_admitted_after = 0
    while 10_000 not in harness.finished:
        while len(harness.core.scheduler.waiting) < 4:  # there is always another one for the adapters in slots
            key += 1
            harness.add(key, [key % 900] * 3, 2 + key % 5, adapter=1 + key % max_loras)
        if key > 40 and 10_000 not in harness.prompts:
            harness.add(10_000, PROMPT, 2, adapter=9)
            num_before = len(harness.cached)
        harness.turn()
        harness.core.scheduler.check_invariants()
        if 10_000 in harness.prompts and 10_000 not in harness.cached:
            num_admitted_after = len(harness.cached) - num_before
            assert num_admitted_after <= MAX_OVERTAKES + 2 * 8, "it starves"
    assert num_admitted_after >= MAX_OVERTAKES - 8, "adapters in slots may overtake it until then"
    assert harness.core.adapters.report()["adapters"].num_closed == 1
    harness.run_to_the_end()


def test_the_slot_with_the_fewest_rows_is_closed_and_filled_when_no_step_in_flight_uses_it() -> None:
    harness = new_harness(max_num_seqs=5, num_blocks=400)
    for key, adapter in enumerate((1, 1, 2, 1)):
        harness.add(key, PROMPT, 200, adapter=adapter)
    harness.turn()
    harness.add(10_000, PROMPT, 2, adapter=3)
    for key in range(10, 10 + 2 * MAX_OVERTAKES):
        harness.add(key, [key] * 3, 1, adapter=1)
    while (closed := harness.core.adapters.closed) is None:
        harness.turn()
    assert closed.digest == digest_of(2)
    harness.run_to_the_end()


def test_a_request_ahead_takes_the_slot_whose_first_request_is_the_last_in_order() -> None:
    harness = new_harness(max_num_seqs=1, scheduling_policy="priority")
    harness.add(1, PROMPT, 30, priority=-1)
    for key, priority in ((2, 2), (3, 1)):
        harness.add(key, PROMPT, 2, adapter=key, priority=priority)
    harness.turns(3)
    assert states(harness) == [SlotState.READY] * 2
    harness.add(4, PROMPT, 2, adapter=4)
    harness.turn()
    assert {slot.digest for slot in harness.core.adapters.table.slots} == {digest_of(3), digest_of(4)}
    assert harness.worker.adapters.num_begun == 3, "no other slot was taken before"
    harness.run_to_the_end()


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_closed_slot_opens_again_when_the_overtaken_request_is_aborted(is_wanted: bool) -> None:
    harness = new_harness(max_loras=1, max_num_seqs=4, num_blocks=400)
    harness.add(0, PROMPT, 200, adapter=1)
    harness.turn()
    harness.add(10_000, PROMPT, 2, adapter=2)
    for key in range(1, 2 * MAX_OVERTAKES):
        harness.add(key, [key] * 3, 1, adapter=1)
    while states(harness) != [SlotState.CLOSED]:
        harness.turn()
    assert len(harness.cached) <= MAX_OVERTAKES + 4
    for key in list(harness.prompts) if not is_wanted else [10_000]:  # all but those that run, or only this one
        if key not in harness.cached:
            harness.abort(key)
    harness.turn()
    assert states(harness) == [SlotState.READY] and harness.worker.adapters.num_begun == 1
    harness.run_to_the_end()
    assert harness.worker.adapters.num_begun == 1


def test_a_request_ahead_keeps_its_slot_though_others_are_overtaken() -> None:
    """The slots are for requests ahead in order that wait only for blocks; none of them is closed for one behind."""
    harness = new_harness(max_loras=2, max_num_seqs=3, num_blocks=20)
    harness.add(0, [1] * 40, 20, adapter=1)  # takes most blocks
    harness.turn()
    harness.turn()
    harness.add(1, [2] * 60, 2, adapter=2)  # waits for them
    harness.turn()
    harness.add(2, [3] * 3, 2, adapter=3)
    for key in range(3, 40):
        harness.add(key, [key] * 3, 1, adapter=1)
    harness.run_to_the_end()
    assert harness.worker.adapters.num_begun == 3, "each was loaded once"


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_failed_fill_ends_only_the_requests_with_its_adapter_and_the_next_one_tries_again() -> None:
    harness = by_hand(tensor_parallel_size=2)
    for key, adapter in ((1, 1), (2, 2), (3, 1), (4, 0)):
        harness.add(key, PROMPT, 2, adapter=adapter)
    harness.turn()
    harness.fill(Rank(0, 1), "FileNotFoundError: /store/1/adapter_model.safetensors")
    assert states(harness) == [SlotState.SPOILED, SlotState.FILLING]
    expected = "the adapter in /store/1 could not be loaded: worker 1: FileNotFoundError: /store/1/adapter_model.saf"
    assert [expected in harness.error_of(key) for key in (1, 3)] == [True, True]
    assert not harness.finished.keys() & {2, 4}
    harness.add(5, PROMPT, 2, adapter=1)
    harness.turn()
    assert harness.worker.adapters.num_begun == 2, "no slot is left while a rank may still write"
    harness.fill(Rank(0, 0))
    assert states(harness) == [SlotState.EMPTY, SlotState.FILLING]
    harness.run_to_the_end()
    assert harness.worker.adapters.num_begun == 3 and harness.finished[5].reason == "length"


def test_a_fill_that_hangs_ends_its_requests_and_its_slot_is_used_when_every_rank_has_answered() -> None:
    slow = SlowFills()
    harness = slow.harness
    harness.add(1, PROMPT, 2, adapter=1)
    harness.turn()
    slow.let_pass(START_TIMEOUT_S)
    assert not harness.finished
    slow.let_pass(1.0)
    assert harness.error_of(1) == (
        "internal: the adapter in /store/1 could not be loaded: worker 0 did not answer within --start-timeout-s 5 s"
    )
    harness.failed_adapters.add(digest_of(1))
    harness.add(2, PROMPT, 2, adapter=1)
    harness.turn()
    assert states(harness) == [SlotState.SPOILED, SlotState.FILLING]
    harness.fill_all()
    assert states(harness) == [SlotState.EMPTY, SlotState.READY]
    harness.run_to_the_end()


def test_requests_end_when_every_slot_waits_for_a_worker_that_does_not_answer() -> None:
    slow = SlowFills(max_loras=1)
    harness = slow.harness
    harness.add(1, PROMPT, 2, adapter=1)
    harness.add(2, PROMPT, 2, adapter=2)
    harness.add(3, PROMPT, 2)
    harness.turn()
    slow.let_pass(START_TIMEOUT_S + 1.0)
    assert "all 1 slots wait for workers that do not answer" in harness.error_of(2)
    harness.failed_adapters |= {digest_of(1), digest_of(2)}
    harness.fill_all()  # at last
    harness.fills_by_itself = True
    harness.add(4, PROMPT, 2, adapter=2)
    harness.run_to_the_end()


def test_a_suspension_of_the_core_is_no_time_of_a_fill() -> None:
    slow = SlowFills()
    harness = slow.harness
    harness.add(1, PROMPT, 2, adapter=1)
    harness.turn()
    slow.let_pass(3600.0, at_once=True)
    slow.let_pass(1.0)
    assert not harness.finished


@pytest.mark.parametrize("stage", ["before the order", "while it is filled", "while a rank is left"])
def test_an_aborted_request_leaves_its_fill_to_the_next_one(stage: str) -> None:
    harness = by_hand(tensor_parallel_size=2)
    harness.add(1, PROMPT, 2, adapter=1)
    if stage != "before the order":
        harness.turn()
    if stage == "while a rank is left":
        harness.fill(Rank(0, 0))
    harness.abort(1)
    harness.turn()
    harness.fill_all()
    harness.add(2, PROMPT, 2, adapter=1)
    harness.run_to_the_end()
    assert harness.worker.adapters.num_begun == 1


# ── losses, pauses and reloads ───────────────────────────────────────────────────────────────────────────────────


def test_an_answer_to_a_fill_from_before_a_reload_counts_for_no_other_fill() -> None:
    harness = by_hand()
    harness.add(1, PROMPT, 20, adapter=1)
    harness.turn()
    late = SlotFilled(step=1, core_epoch=0, generation=0, rank=Rank(0, 0), slot=1, digest=digest_of(1))
    harness.core.pause("keep")
    harness.core.forget_computed()
    harness.core.scheduler.take_step()
    harness.worker.reload()
    harness.core.resume()
    harness.turn()
    assert states(harness) == [SlotState.FILLING, SlotState.EMPTY], "the same adapter, in the same slot"
    harness.core.adapters.on_filled(late)
    assert states(harness) == [SlotState.FILLING, SlotState.EMPTY]
    harness.run_to_the_end()


def test_no_slot_is_filled_during_a_pause_and_a_fill_under_way_ends_in_it() -> None:
    harness = by_hand()
    harness.add(1, PROMPT, 2, adapter=1)
    harness.turn()
    harness.core.pause("keep")
    assert harness.core.is_quiet, "a fill is no step"
    harness.add(2, PROMPT, 2, adapter=2)
    harness.turn()
    assert states(harness) == [SlotState.FILLING, SlotState.EMPTY]
    harness.fill_all()
    assert states(harness) == [SlotState.READY, SlotState.EMPTY]
    harness.core.resume()
    harness.run_to_the_end()


def test_a_pause_that_lets_requests_end_gives_them_slots_that_new_ones_ahead_want() -> None:
    harness = new_harness(max_loras=1, max_num_seqs=1, scheduling_policy="priority")
    harness.add(1, PROMPT, 20, adapter=1, priority=1)
    harness.turns(5)
    harness.add(2, PROMPT, 20, priority=-1)  # preempts it
    harness.turn()
    harness.add(3, PROMPT, 20, adapter=2, priority=-2)
    harness.core.pause("wait")
    harness.turns(60)
    assert harness.finished.keys() == {1, 2} and harness.core.is_quiet
    harness.core.resume()
    harness.run_to_the_end()


@pytest.mark.parametrize("num_requests", [1, 5])
def test_an_adapter_that_ends_the_workers_is_given_up_and_all_others_go_on(num_requests: int) -> None:
    harness = new_harness(max_loras=2)
    for key in range(6):
        harness.add(key, [key] * 5, 4, adapter=key % 3)
    for key in range(10, 10 + num_requests):
        harness.add(key, [key] * 5, 4, adapter=9)
    harness.run_with_deadly_workers(lambda: digest_of(9) in harness.worker.adapters.loading(0))
    harness.failed_adapters.add(digest_of(9))
    harness.run_to_the_end()
    ends = {key: finished.reason for key, finished in harness.finished.items()}
    assert ends == {key: "error" if key >= 10 else "length" for key in harness.prompts}
    assert "could not be loaded: the workers have ended while they did nothing else: a test" in harness.error_of(10)


def test_a_request_with_an_adapter_that_ends_the_workers_is_found_among_requests_with_others() -> None:
    harness = new_harness(max_loras=1)
    for key in range(8):
        harness.add(key, [key] * 5, 6, adapter=key % 4)
    harness.run_with_deadly_workers(lambda: harness.computes(5))
    harness.run_to_the_end()
    assert [key for key, finished in harness.finished.items() if finished.reason == "error"] == [5]
    assert "this request has ended the workers" in harness.error_of(5)


# ── limits and reports ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "options, expected",
    [
        (
            {"enable_lora": False},
            "request: the request names an adapter, the engine serves none: start it with --enable-lora",
        ),
        (
            {"max_lora_rank": 4},
            "request: the adapter in /store/1 has rank 8, at most 4 is served: raise --max-lora-rank",
        ),
    ],
)
def test_a_request_with_an_adapter_that_cannot_be_served_is_refused(options: dict[str, object], expected: str) -> None:
    harness = new_harness(**options)
    harness.add(1, PROMPT, 2, adapter=1)
    harness.take()
    assert harness.error_of(1) == expected and harness.core.num_requests == 0


def test_progress_tells_the_state_of_the_slots() -> None:
    slow = SlowFills()
    harness = slow.harness
    assert new_harness(enable_lora=False).core.progress(1e9).adapters is None  # type: ignore[union-attr]
    for key, adapter in ((1, 1), (2, 1), (3, 2), (4, 3)):
        harness.add(key, PROMPT, 20, adapter=adapter)
    harness.turn()
    slow.let_pass(2.0)
    harness.fill(Rank(0, 0))
    harness.fill(Rank(0, 0), "a damaged file")
    harness.turn()
    harness.add(5, PROMPT, 2, adapter=1)
    progress = harness.core.progress(1e9)
    assert progress is not None
    assert progress.adapters == AdaptersProgress(
        num_slots=2,
        num_ready=1,
        num_filling=1,
        num_waiting=1,
        num_queued=5,
        num_hits=1,
        num_fills=1,
        num_failed_fills=1,
        fill_s=2.0,
        wait_s=8.0,
        running=[digest_of(1)],
        waiting=[digest_of(3)],
    )
    assert progress.num_deferred == 1


def test_a_core_adopts_an_adapter_once_and_only_into_its_own_slots() -> None:
    contents = [(1, 7), (2, 7), (3, 8), (4, 9)]
    table = AdapterTable(3, [Rank(0, 0)])
    table.adopt([SlotContent(slot=slot, digest=digest_of(adapter)) for slot, adapter in contents])
    assert [(slot.state, slot.digest) for slot in table.slots] == [
        (SlotState.READY, digest_of(7)),
        (SlotState.EMPTY, b""),
        (SlotState.READY, digest_of(8)),
    ]
    table.check_invariants([])


def test_an_illegal_move_of_a_slot_raises_and_changes_nothing() -> None:
    for state, other in itertools.product(SlotState, SlotState):
        slot = AdapterSlot(1, state)
        if (state, other) in LEGAL_MOVES:
            slot.move(other)
            assert slot.state is other
        else:
            with pytest.raises(AssertionError, match=f"slot 1: {state.name} → {other.name} is not a legal move"):
                slot.move(other)
            assert slot.state is state
