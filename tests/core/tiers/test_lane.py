"""The threads of a source: each block ends once, even if its source fails, and loads come before writes."""

from __future__ import annotations

import mmap
import random
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tokenloom.core.tiers.disk import DiskSource
from tokenloom.core.tiers.lane import CALL_BYTES, Lane, SlotItem
from tokenloom.core.tiers.reports import BATCH, LoadJob, Reports, StoreJob
from tokenloom.core.tiers.source import Item
from tokenloom.ipc.codec import decode_ids
from tokenloom.ipc.messages.tier import BlocksLoaded, BlocksStored, TierToCore
from tokenloom.tests.core.tiers.slots import (
    DEADLINE_S,
    SLOT_BYTES,
    content_of,
    empty,
    filled,
    key_of,
    open_disk,
    path_of,
)
from tokenloom.tests.core.tiers.test_finder import SetSource
from tokenloom.tests.support.waiting import wait_until

NUMBERS = range(50)
DAMAGES = ("corrupt", "truncate", "swap")


def messages_of(reports: Reports) -> list[TierToCore]:
    """Wait like the loop does, until there are messages."""
    deadline = time.monotonic() + DEADLINE_S
    while not (messages := reports.take()):
        now = time.monotonic()
        assert now < deadline, "no report"
        due = deadline if reports.due is None else min(deadline, reports.due)
        select.select([reports.wake_fd], [], [], max(due - now, 0.0))  # it may have passed since
    return messages


def end_of(reports: Reports) -> dict[int, int]:
    """Return the result of each slot of the one job that runs."""
    found: dict[int, int] = {}
    while True:
        for message in messages_of(reports):
            if isinstance(message, BlocksLoaded):
                news = {
                    **dict.fromkeys(decode_ids(message.slots), 1),
                    **dict.fromkeys(decode_ids(message.bad_slots), 0),
                }
            else:
                assert isinstance(message, BlocksStored)
                news = dict(zip(decode_ids(message.slots), message.targets, strict=True))
            assert not found.keys() & news.keys(), "reported twice"
            found |= news
            if message.is_last:
                return found


def blocks_of(items: Sequence[Item]) -> list[SlotItem]:
    return [SlotItem(slot, item) for slot, item in enumerate(items, 1)]


class FaultySource(SetSource):
    """A disk source of which a share of the blocks is not read, not written, or has a damaged file when it is read."""

    def __init__(self, source: DiskSource, share: float) -> None:
        super().__init__("disk")
        self.num_loaders, self.load_batch, self.store_batch = source.num_loaders, source.load_batch, source.store_batch
        self.counts = Counter[str]()
        self._source, self._share = source, share
        self._rng, self._lock = random.Random(0), threading.Lock()

    def _fault(self, *possible: str) -> str:
        """Draw the fault that a block meets; "" is none."""
        fault = self._rng.choice(possible) if self._rng.random() < self._share else ""
        self.counts[fault] += 1
        return fault

    def load(self, items: Sequence[Item], deadline: float, on_loaded: Callable[[int, bool], None]) -> None:
        for index, item in enumerate(items):
            with self._lock:
                fault = self._fault("drop", *DAMAGES)
                if fault in DAMAGES:
                    self._damage(item.key, fault)
            if fault == "drop":
                on_loaded(index, False)
            else:
                self._source.load([item], deadline, partial(_as, index, on_loaded))

    def _damage(self, key: bytes, fault: str) -> None:
        assert self._source._view is not None
        path = Path(self._source._view.path(key, 0))
        with suppress(FileNotFoundError):
            content = bytearray(path.read_bytes())
            if fault == "corrupt":
                content[self._rng.randrange(len(content))] ^= 1 << self._rng.randrange(8)
            elif fault == "truncate":
                content = content[: self._rng.randrange(len(content))]
            else:
                content = bytearray(path_of(self._source, self._rng.choice(NUMBERS)).read_bytes())
            path.write_bytes(content)

    def store(self, items: Sequence[Item]) -> list[bool]:
        with self._lock:
            return [not self._fault("no space") and self._source.store([item])[0] for item in items]


def _as(index: int, on_loaded: Callable[[int, bool], None], _: int, is_good: bool) -> None:
    on_loaded(index, is_good)


@pytest.mark.parametrize("num_faults", [1000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_thousands_of_faults_and_no_wrong_block(tmp_path: Path, num_faults: int) -> None:
    source = open_disk(tmp_path)
    faulty, reports = FaultySource(source, 0.5), Reports()
    lane, whole = Lane(faulty, 1), filled(NUMBERS)
    num_good = num_bad = 0
    while faulty.counts.total() < 2 * num_faults:
        source.store(whole)
        blocks = blocks_of(empty(NUMBERS))
        lane.load(LoadJob(1, len(blocks), reports, time.monotonic() + DEADLINE_S), blocks)
        found = end_of(reports)
        assert found.keys() == {block.slot for block in blocks}
        for slot, item in blocks:
            assert not found[slot] or item.slot == content_of(item.key), "a wrong block"
        num_good += sum(found.values())
        num_bad += len(found) - sum(found.values())
    assert set(faulty.counts) == {"", "drop", *DAMAGES} and min(num_good, num_bad) > num_faults // 3
    assert set(source.state().rejected) >= {"checksum", "length", "key"}


def test_stores_with_faults_report_the_blocks_that_are_there(tmp_path: Path) -> None:
    source, reports, ended = open_disk(tmp_path), Reports(), list[int]()
    lane, blocks = Lane(FaultySource(source, 0.4), 1), blocks_of(filled(range(60)))
    job = StoreJob(1, len(blocks), reports, ended.append)
    for block in blocks:
        job.expect(block.slot, 1)
    lane.store(job, blocks)
    found = end_of(reports)
    assert {slot: source.find([item.key], SLOT_BYTES, 0) for slot, item in blocks} == found
    assert 0 < sum(found.values()) < 60 and sorted(ended) == [block.slot for block in blocks]


class GatedSource(SetSource):
    """Loads and stores when a gate opens, and keeps the order in which they began."""

    def __init__(self) -> None:
        super().__init__("disk")
        self.began: list[str] = []
        self.has_begun = threading.Semaphore(0)
        self.turns = threading.Semaphore(0)

    def _turn(self, what: str) -> None:
        self.began.append(what)
        self.has_begun.release()
        assert self.turns.acquire(timeout=DEADLINE_S)

    def load(self, items: Sequence[Item], deadline: float, on_loaded: Callable[[int, bool], None]) -> None:
        self._turn("load")
        on_loaded(0, True)

    def store(self, items: Sequence[Item]) -> list[bool]:
        self._turn("store")
        return [True]


def test_no_write_begins_while_loads_wait() -> None:
    source, reports = GatedSource(), Reports()
    lane, blocks = Lane(source, 1), blocks_of(filled(range(4)))
    load_job, store_job = LoadJob(1, 4, reports, time.monotonic() + DEADLINE_S), StoreJob(2, 4, reports, lambda _: None)
    for block in blocks:
        store_job.expect(block.slot, 1)
    lane.load(load_job, blocks)
    assert source.has_begun.acquire(timeout=DEADLINE_S)
    lane.store(store_job, blocks)
    for _ in range(7):
        source.turns.release()
        assert source.has_begun.acquire(timeout=DEADLINE_S)
    source.turns.release()
    assert source.began.index("store") >= 3, "one load runs, and no other waits"
    assert sorted(source.began[:5]) == ["load"] * 4 + ["store"] and source.began[5:] == ["store"] * 3
    assert lane.queued_bytes <= SLOT_BYTES


def test_a_call_has_a_batch_of_blocks_and_fewer_of_large_ones() -> None:
    class Counting(SetSource):
        def __init__(self) -> None:
            super().__init__("disk")
            self.load_batch = self.store_batch = 4
            self.loads, self.stores = list[int](), list[int]()

        def load(self, items: Sequence[Item], deadline: float, on_loaded: Callable[[int, bool], None]) -> None:
            self.loads.append(len(items))

        def store(self, items: Sequence[Item]) -> list[bool]:
            self.stores.append(len(items))
            return [True] * len(items)

    source, reports = Counting(), Reports()
    lane, memory = Lane(source, 1), memoryview(mmap.mmap(-1, CALL_BYTES + 1))
    sizes = [1] * 5 + [CALL_BYTES // 2, CALL_BYTES // 2, 1, CALL_BYTES + 1, 1, 1]
    blocks = blocks_of([Item(key_of(number), memory[:size]) for number, size in enumerate(sizes)])
    lane.load(LoadJob(1, len(blocks), reports, time.monotonic() + DEADLINE_S), blocks)
    assert end_of(reports) == dict.fromkeys(range(1, 12), 0) and source.loads == [4, 2, 2, 1, 2]
    job = StoreJob(2, len(blocks), reports, lambda _: None)
    for block in blocks:
        job.expect(block.slot, 1)
    lane.store(job, blocks)
    assert end_of(reports) == dict.fromkeys(range(1, 12), 1) and source.stores == [4, 2, 2, 1, 2]
    wait_until(lambda: lane.queued_bytes == 0)


def test_a_source_that_ends_early_or_raises_leaves_no_block_open() -> None:
    class Careless(SetSource):
        def load(self, items: Sequence[Item], deadline: float, on_loaded: Callable[[int, bool], None]) -> None:
            on_loaded(0, True)
            if len(items) > 1:
                raise RuntimeError("a bug")

    source, reports = Careless("disk"), Reports()
    source.load_batch = 3
    Lane(source, 1).load(LoadJob(1, 4, reports, time.monotonic() + DEADLINE_S), blocks_of(filled(range(4))))
    assert end_of(reports) == {1: 1, 2: 0, 3: 0, 4: 1}


def test_after_its_deadline_a_job_is_not_read() -> None:
    source, reports = GatedSource(), Reports()
    Lane(source, 1).load(LoadJob(1, 4, reports, time.monotonic() - 1), blocks_of(filled(range(4))))
    assert end_of(reports) == dict.fromkeys(range(1, 5), 0) and source.began == []


def test_reports_wait_for_a_batch_and_at_most_five_milliseconds() -> None:
    reports = Reports()
    job = LoadJob(1, 100, reports, 0.0)
    begun = time.monotonic()
    job.end(1, 1)
    assert reports.take() == [] and reports.due is not None and begun < reports.due < begun + 5
    (report,) = messages_of(reports)
    assert report == BlocksLoaded(job=1, slots=b"\1\0\0\0", bad_slots=b"", is_last=False)
    assert time.monotonic() - begun >= 0.005
    for slot in range(2, 2 + BATCH):
        assert reports.take() == []
        job.end(slot, 0)
    (report,) = reports.take()
    assert isinstance(report, BlocksLoaded) and len(decode_ids(report.bad_slots)) == BATCH
    assert reports.take() == [] and reports.due is None


@pytest.mark.parametrize("bits", [0, 1, 2, 3])
def test_a_block_for_two_places_ends_with_the_last_of_them(bits: int) -> None:
    reports, ended = Reports(), list[int]()
    job = StoreJob(1, 1, reports, ended.append)
    job.expect(5, 2)
    job.written(5, bits & 1)
    assert reports.take() == [] and not ended
    job.written(5, bits & 2)
    assert end_of(reports) == {5: bits} and ended == [5]
