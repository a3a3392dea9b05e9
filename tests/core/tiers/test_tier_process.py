"""The tier process, with this test as its supervisor and its core, over real sockets."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tokenloom.core.kv.block_hash import block_keys
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.messages.supervisor import Failed, Stop
from tokenloom.ipc.messages.tier import (
    BlocksFound,
    BlocksLoaded,
    BlocksStored,
    CancelLoad,
    ClearTier,
    FindBlocks,
    FindGroup,
    FlushTier,
    LoadBlocks,
    OpenTier,
    StoreBlocks,
    TierCleared,
    TierFlushed,
    TierOpened,
    TierState,
)
from tokenloom.tests.core.tiers.slots import OBJECT_BYTES, SLOT_BYTES, content_of, files_of, key_of
from tokenloom.tests.core.tiers.tier_bench import DEADLINE_S, TierBench
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.waiting import num_switches, wait_until

SLOTS = range(1, 41)  # of 64; a quarter of them may wait to be written


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENLOOM_FAULTS", str(folder))
        yield folder


@pytest.fixture
def closed(tmp_path: Path, faults: Path) -> Iterator[TierBench]:
    """A process that the test opens, and may end."""
    with contextlib.closing(TierBench(tmp_path, num_slots=160)) as bench:
        bench.start()
        yield bench


@pytest.fixture
def own(closed: TierBench) -> TierBench:
    """A process that the test may end."""
    closed.open()
    return closed


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, faults: Path) -> Iterator[TierBench]:
    with contextlib.closing(TierBench(tmp_path_factory.mktemp("tier"), num_slots=160)) as bench:
        bench.start()
        bench.open()
        yield bench


@pytest.fixture
def bench(shared: TierBench) -> TierBench:
    """An open process without blocks."""
    shared.say(ClearTier(serial=0))
    shared.get(TierCleared)
    shared.seen.clear()
    return shared


def test_blocks_are_stored_found_and_loaded(closed: TierBench) -> None:
    own, namespace = closed, closed.open()
    tokens = np.arange(4 * 20, dtype=np.int32).tobytes()
    keys = list(block_keys(namespace, tokens, 4))
    for slot, each in zip(SLOTS, keys[:15], strict=False):
        own.arena.slot(slot)[:] = content_of(each)
    own.say(
        StoreBlocks(
            job=1, keys=b"".join(keys[:15]), slots=encode_ids(range(1, 16)), targets=b"\1" * 15, owners=bytes(8 * 15)
        )
    )
    assert own.stored(1) == dict.fromkeys(range(1, 16), 1)
    own.say(FindBlocks(serial=7, parent=namespace, token_ids=tokens, block_size=4, groups=[FindGroup()]))
    assert own.get(BlocksFound) == BlocksFound(serial=7, sources=[bytes(15)], end=15)
    own.say(LoadBlocks(job=2, keys=b"".join(keys[:16]), slots=encode_ids(range(101, 117)), sources=bytes(16)))
    assert own.loaded(2) == {**dict.fromkeys(range(101, 116), True), 116: False}
    for slot, each in zip(range(101, 116), keys, strict=False):
        assert own.arena.slot(slot) == content_of(each)
    state = own.get(TierState, lambda message: message.sources[0].num_read == 15).sources[0]
    assert (state.num_objects, state.held_bytes, state.num_written) == (15, 15 * OBJECT_BYTES, 15)
    assert state.read_s > 0 and state.write_s > 0
    own.order(Stop())
    assert own.process.wait(DEADLINE_S) == 0


def test_results_are_reported_in_batches(bench: TierBench) -> None:
    bench.put(1, SLOTS)
    bench.stored(1)
    bench.load(2, SLOTS, SLOTS)
    bench.get(BlocksLoaded, lambda message: message.is_last)
    assert len([each for each in bench.seen if isinstance(each, BlocksLoaded)]) < len(SLOTS) / 2
    bench.load(3, [], [])
    assert bench.loaded(3) == {}
    bench.store(4, [], [])
    assert bench.stored(4) == {}


def test_before_it_is_open_there_is_nothing_and_nothing_waits(closed: TierBench) -> None:
    closed.load(1, [1, 2], [1, 2])
    closed.store(2, [3], [3])
    closed.say(FindBlocks(serial=1, parent=bytes(32), token_ids=bytes(64), block_size=4, groups=[FindGroup()]))
    assert closed.loaded(1) == {1: False, 2: False} and closed.stored(2) == {3: 0}
    assert closed.get(BlocksFound).sources == [b""]


def test_a_source_that_is_not_configured_has_nothing(bench: TierBench) -> None:
    bench.load(1, [1, 2], [1, 2], source=1)
    bench.store(2, [3], [3], target=2)
    assert bench.loaded(1) == {1: False, 2: False} and bench.stored(2) == {3: 0}


def test_what_finds_no_room_in_the_queue_is_returned_at_once(bench: TierBench, faults: Path) -> None:
    fault = inject(faults, "tier.store", "delay 0.5")
    slots = range(1, 101)
    bench.put(1, slots)
    first = bench.get(BlocksStored)
    assert len(decode_ids(first.slots)) >= 16 and set(first.targets) == {0}
    bench.seen.insert(0, first)
    stored = bench.stored(1)
    assert sum(stored.values()) == 40 and not fault.exists(), "a quarter of the arena"
    assert all(stored[slot] == 1 for slot in range(1, 41))
    bench.store(2, range(101, 141), range(101, 141))
    assert bench.stored(2) == dict.fromkeys(range(101, 141), 1), "the queue is empty again"


def test_flush_awaits_the_writes_before_it(bench: TierBench, faults: Path) -> None:
    inject(faults, "tier.store", "delay 0.3")
    bench.put(1, SLOTS)
    bench.say(FlushTier(serial=5))
    assert bench.get(TierFlushed).serial == 5
    assert len(files_of(bench.root)) == len(SLOTS)
    assert bench.stored(1) == dict.fromkeys(SLOTS, 1)
    bench.say(FlushTier(serial=6))
    assert bench.get(TierFlushed).serial == 6


def test_a_stop_lets_queued_writes_end(own: TierBench, faults: Path) -> None:
    fault = inject(faults, "tier.store", "delay 0.3")
    own.put(1, SLOTS)
    wait_until(lambda: not fault.exists())
    own.order(Stop())
    assert own.process.wait(DEADLINE_S) == 0
    assert len(files_of(own.root)) == len(SLOTS)


def test_clear_removes_everything(bench: TierBench, faults: Path) -> None:
    bench.fill(SLOTS, SLOTS)
    bench.store(1, SLOTS[:10], SLOTS[:10])
    bench.stored(1)
    fault = inject(faults, "tier.store", "delay 0.3")
    bench.store(2, SLOTS[10:], SLOTS[10:])
    wait_until(lambda: not fault.exists())
    bench.say(ClearTier(serial=3))
    bench.get(TierCleared, lambda message: message.serial == 3)
    assert set(bench.stored(2)) == set(SLOTS[10:])
    assert files_of(bench.root) == []
    bench.store(3, [1], [1])
    assert bench.stored(3) == {1: 1}


def test_a_cancelled_load_reports_every_slot_once(bench: TierBench, faults: Path) -> None:
    bench.put(1, SLOTS)
    bench.stored(1)
    inject(faults, "tier.load", "delay 0.3 always")
    bench.load(2, SLOTS, SLOTS)
    bench.say(CancelLoad(job=2))
    bench.say(CancelLoad(job=77))
    loaded = bench.loaded(2)
    assert loaded.keys() == set(SLOTS) and sum(loaded.values()) <= 16, "only calls that had begun"


def test_an_error_in_a_thread_makes_blocks_bad_and_the_next_go_on(own: TierBench, faults: Path) -> None:
    own.fill([1, 2], [1, 2])
    inject(faults, "tier.store", "memory")
    own.store(1, [1], [1])
    assert own.stored(1) == {1: 0}
    own.store(2, [1, 2], [1, 2])
    assert own.stored(2) == {1: 1, 2: 1}
    inject(faults, "tier.load", "error")
    own.load(3, [11, 12], [1, 2])
    assert own.loaded(3) == {11: False, 12: False}
    own.load(4, [11, 12], [1, 2])
    assert own.loaded(4) == {11: True, 12: True}
    inject(faults, "tier.receive", "error")
    own.load(5, [11], [1])
    assert "injected at tier.receive" in own.hear(Failed).error.message
    assert own.process.wait(DEADLINE_S) == 1


def test_a_stopped_process_writes_no_slot_after_its_last_report(bench: TierBench) -> None:
    bench.put(1, SLOTS)
    bench.stored(1)
    for slot in SLOTS:
        bench.arena.slot(slot + 40)[:] = bytes(SLOT_BYTES)
    os.kill(bench.process.pid, signal.SIGSTOP)
    bench.load(2, range(41, 81), SLOTS)
    bench.say(CancelLoad(job=2))
    os.kill(bench.process.pid, signal.SIGCONT)
    loaded = bench.loaded(2)
    for slot, is_good in loaded.items():
        if not is_good:
            bench.arena.slot(slot)[:] = b"\x55" * SLOT_BYTES  # the core gives it to another block
    bench.say(FlushTier(serial=1))
    bench.get(TierFlushed)
    for slot, is_good in loaded.items():
        assert bench.arena.slot(slot) == (content_of(key_of(slot - 40)) if is_good else b"\x55" * SLOT_BYTES)


def test_after_a_kill_the_next_process_loads_only_whole_blocks(tmp_path: Path) -> None:
    with contextlib.closing(TierBench(tmp_path, num_slots=160)) as bench:
        bench.start()
        namespace = bench.open()
        bench.put(1, SLOTS)
        bench.get(BlocksStored)
        bench.process.kill()
    with contextlib.closing(TierBench(tmp_path, num_slots=160)) as bench:
        bench.start()
        assert bench.open() == namespace
        bench.load(1, SLOTS, SLOTS)
        loaded = bench.loaded(1)
        assert 0 < sum(loaded.values()) == len(files_of(bench.root))
        for slot, is_good in loaded.items():
            assert not is_good or bench.arena.slot(slot) == content_of(key_of(slot))


def test_of_two_orders_to_open_the_last_counts(closed: TierBench) -> None:
    for serial in range(5):
        closed.say(OpenTier(serial=serial, model_folder="", facts=b"%d" % serial))
    closed.get(TierOpened, lambda message: message.serial == 4)


def test_weights_that_cannot_be_read_leave_the_tiers_closed(tmp_path: Path) -> None:
    with contextlib.closing(TierBench(tmp_path, load_format="auto")) as bench:
        bench.start()
        bench.say(OpenTier(serial=1, model_folder=str(tmp_path / "none"), facts=b"{}"))
        state = bench.get(TierState, lambda message: bool(message.sources[0].error)).sources[0]
        assert "is --model the right folder?" in state.error and not state.is_open
        bench.load(1, [1], [1])
        assert bench.loaded(1) == {1: False}


def test_an_unusable_secret_ends_the_start(tmp_path: Path) -> None:
    with contextlib.closing(TierBench(tmp_path, kv_key_file=str(tmp_path / "none"))) as bench:
        error = bench.hear(Failed).error
        assert error.kind == "config" and "--kv-key-file" in error.message
        assert bench.process.wait(DEADLINE_S) == 2


def test_malformed_orders_stop_nothing(bench: TierBench) -> None:
    for slots, num_keys in (([0], 1), ([161], 1), ([1], 2), ([1, 2], 1), ([-5], 1)):
        bench.say(LoadBlocks(job=1, keys=bytes(32 * num_keys), slots=encode_ids(slots), sources=bytes(len(slots))))
    bench.say(LoadBlocks(job=1, keys=bytes(31), slots=bytes(3), sources=b""))
    bench.say(StoreBlocks(job=1, keys=bytes(32), slots=encode_ids([1]), targets=b"\1", owners=bytes(7)))
    bench.say(FindBlocks(serial=1, parent=b"", token_ids=b"", block_size=0, groups=[FindGroup()]))
    few_here = [FindGroup(here=b"\1")]
    bench.say(FindBlocks(serial=1, parent=bytes(32), token_ids=bytes(32), block_size=4, groups=few_here))
    bench.say(FindBlocks(serial=1, parent=bytes(32), token_ids=bytes(32), block_size=4, groups=[]))
    bench.core.send(b"nonsense")
    bench.load(9, [1], [1])
    assert bench.loaded(9) == {1: False}
    bench.say(FindBlocks(serial=2, parent=bytes(32), token_ids=bytes(32), block_size=4, groups=[FindGroup()]))
    assert bench.get(BlocksFound) == BlocksFound(serial=2, sources=[b""], end=0)
    assert not [each for each in bench.seen if isinstance(each, BlocksLoaded)]


def test_an_idle_process_does_not_wake(bench: TierBench) -> None:
    bench.put(1, [1])
    bench.stored(1)
    bench.get(TierState, lambda message: not message.sources[0].queued_bytes)
    before, begun = num_switches(bench.process.pid), time.monotonic()
    assert not bench.core.poll(500)
    assert num_switches(bench.process.pid) - before <= 5 * (time.monotonic() - begun)


def test_the_process_dies_with_its_lifeline(closed: TierBench) -> None:
    os.close(closed.lifeline)
    assert closed.process.wait(DEADLINE_S) != 0
    closed.lifeline = os.open(os.devnull, os.O_RDONLY)


def test_weights_that_a_shortage_hides_are_read_when_it_is_over(tmp_path: Path) -> None:
    with contextlib.closing(TierBench(tmp_path, load_format="auto")) as bench:
        bench.start()
        # So that it has accepted the core.
        bench.say(FindBlocks(serial=1, parent=bytes(32), token_ids=b"", block_size=4, groups=[FindGroup()]))
        bench.get(BlocksFound)
        checkpoint = tiny_checkpoint(tmp_path / "model")
        soft, hard = resource.prlimit(bench.process.pid, resource.RLIMIT_NOFILE)
        used = {int(path.name) for path in Path(f"/proc/{bench.process.pid}/fd").iterdir()}
        lowest = min(set(range(len(used) + 1)) - used)
        resource.prlimit(bench.process.pid, resource.RLIMIT_NOFILE, (lowest, hard))
        bench.say(OpenTier(serial=1, model_folder=str(checkpoint), facts=b"{}"))
        state = bench.get(TierState, lambda message: bool(message.sources[0].error))
        assert re.search("model.* cannot be read: Too many open files: raise the limit", state.sources[0].error)
        resource.prlimit(bench.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert bench.get(TierOpened).serial == 1
        bench.get(TierState, lambda message: message.sources[0].is_open and not message.sources[0].error)
        assert bench.log().count("the KV tiers stay closed for now: ") == 1
