"""Lane: the threads of one source: some that load and one that stores.

Loads have priority: no write starts while a load waits. A thread blocks while it has nothing to do. A call of the
source has as many blocks as it wants, but of a few large ones no more than CALL_BYTES.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from ...ipc.process.faults import maybe_fail
from ...ipc.shortages.threads import start_thread
from .reports import LoadJob, StoreJob
from .source import Item, Source, num_within

logger = logging.getLogger("tokenloom.tiers")

WRITER_NICENESS = 10
CALL_BYTES = 256 << 20  # most in one call, but for a single block; a load that is cancelled completes its call


class SlotItem(NamedTuple):
    """Block of a job, with the number of its slot."""

    slot: int
    item: Item

    @property
    def num_bytes(self) -> int:
        return len(self.item.slot)


class Lane:
    """Owner of the queues of one source. Each block given to `load` or `store` ends exactly once, even after a
    failure."""

    def __init__(self, source: Source, store_bit: int) -> None:
        """`store_bit`: the bit that stands for the source in the results of StoreJob."""
        self.source = source
        self._store_bit = store_bit
        lock = threading.Lock()
        self._can_load, self._can_store = threading.Condition(lock), threading.Condition(lock)
        self._loads: deque[tuple[LoadJob, Sequence[SlotItem]]] = deque()
        self._stores: deque[tuple[StoreJob, SlotItem]] = deque()
        self._num_storing = 0
        self.queued_bytes = 0  # of the blocks that wait to be written or are being written
        targets = [self._run_loads] * source.num_loaders + [self._run_stores]
        for target in targets:
            start_thread(source.name, target)

    def load(self, job: LoadJob, blocks: Sequence[SlotItem]) -> None:
        calls = []
        while blocks:
            size = _size_of_call(blocks, self.source.load_batch)
            calls.append((job, blocks[:size]))
            blocks = blocks[size:]
        with self._can_load:
            self._loads += calls
            self._can_load.notify(len(calls))

    def store(self, job: StoreJob, blocks: Sequence[SlotItem]) -> None:
        with self._can_store:
            self._stores += [(job, block) for block in blocks]
            self.queued_bytes += _num_bytes(blocks)
            self._can_store.notify()

    def drop_stores(self) -> None:
        """End all writes that have not started, as failed, and wait for those that have."""
        with self._can_store:
            dropped, self._stores = self._stores, deque()
            self.queued_bytes -= _num_bytes(block for _, block in dropped)
            self._can_store.wait_for(lambda: not self._num_storing)
        for job, block in dropped:
            job.written(block.slot, 0)

    def finish_stores(self, deadline: float) -> None:
        """Wait until everything is written, at most until the deadline (monotonic seconds)."""
        with self._can_store:
            timeout_s = max(deadline - time.monotonic(), 0)
            self._can_store.wait_for(lambda: not self._stores and not self._num_storing, timeout_s)

    def _run_loads(self) -> None:
        while True:
            with self._can_load:
                self._can_load.wait_for(lambda: self._loads)
                job, blocks = self._loads.popleft()
                if not self._loads:
                    self._can_store.notify()
            self._load(job, blocks)

    def _load(self, job: LoadJob, blocks: Sequence[SlotItem]) -> None:
        waiting = set(range(len(blocks)))

        def on_loaded(index: int, is_good: bool) -> None:
            waiting.remove(index)
            job.end(blocks[index].slot, int(is_good))

        try:
            if not job.is_cancelled and time.monotonic() < job.deadline:
                maybe_fail("tier.load")
                self.source.load([block.item for block in blocks], job.deadline, on_loaded)
        except Exception:
            logger.exception("a load from the %s failed", self.source.name)
        for index in sorted(waiting):
            job.end(blocks[index].slot, 0)

    def _run_stores(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
        while True:
            with self._can_store:
                self._can_store.wait_for(lambda: self._stores and not self._loads)
                first = [block for _, block in islice(self._stores, self.source.store_batch)]
                size = _size_of_call(first, len(first))
                entries = [self._stores.popleft() for _ in range(size)]
                self._num_storing = size
            results = [False] * size
            try:
                maybe_fail("tier.store")
                results = self.source.store([block.item for _, block in entries])
            except Exception:
                logger.exception("a write to the %s failed", self.source.name)
            with self._can_store:
                self._num_storing = 0
                self.queued_bytes -= _num_bytes(block for _, block in entries)
                self._can_store.notify_all()
            for (job, block), is_stored in zip(entries, results, strict=True):
                job.written(block.slot, self._store_bit if is_stored else 0)


def _num_bytes(blocks: Iterable[SlotItem]) -> int:
    return sum(block.num_bytes for block in blocks)


def _size_of_call(blocks: Sequence[SlotItem], most: int) -> int:
    """Return how many of the first blocks one call gets, at most `most`."""
    return num_within((block.num_bytes for block in blocks[:most]), CALL_BYTES)
