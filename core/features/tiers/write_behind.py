"""WriteBehind: decides which blocks are written to the disk and the remote store, and when.

Blocks are written when they have been computed, not when the pool evicts them, so that an engine that was killed finds
them when it starts again. Of groups with windows only those blocks come here that other requests are likely to need. A
block is written when it is seen for the second time: computed again, or found in the pool. While few writes are queued,
it is written to the disk at first sight, so that a lone user's restart is warm. The tier process is woken for many
blocks at once, since each wake-up may disturb a step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from ....ipc.codec import encode_ids
from ....ipc.messages.tier import STORE_ON_DISK, STORE_REMOTELY, BlocksStored, StoreBlocks
from ...kv.block_hash import object_name
from ...kv.block_pool import BlockPool
from ...scheduling.step.step_copies import Write
from .copy_plan import CopyPlan
from .slots import Slots

MARK_BYTES = 8  # of a key, by which it is remembered
NUM_MARKS = 1 << 17  # keys that are remembered, at least
BATCH = 64  # blocks for which the tier process is woken
BATCH_S = 0.1  # seconds after which it is woken for fewer
STORES_PER_STEP = 8  # blocks that a step with decoding rows copies to slots to be written: about 1 % of its time
WRITING_SHARE = 0.25  # of the slots, at most, may be about to be written
WRITING_BYTES = 256 << 20  # likewise, in bytes; the tier process takes no more
MAX_CANDIDATES = 4096
FIRST_SIGHT = 256  # with fewer candidates, blocks are written at first sight: more than two steps add


class _Candidate(NamedTuple):
    group: int
    block: int
    key: bytes
    name: bytes
    targets: int
    owner: int


class WriteBehind:
    """Queue of blocks to write. Owns the candidates (blocks to copy to slots), and the references to slots that are to
    be written or being written."""

    def __init__(self, pools: Sequence[BlockPool], slots: Slots, plan: CopyPlan, *, is_host_tier: bool) -> None:
        """pools: by KV group. is_host_tier: slots keep their content after it is written."""
        self._pools, self._slots, self._plan, self._is_host_tier = pools, slots, plan, is_host_tier
        self.targets = 0  # bits of the targets that may be written to now; 0: the tiers are closed
        self.writes_salted_remotely = True
        most = min(int(WRITING_SHARE * slots.num_bytes), WRITING_BYTES)
        self._max_writing_bytes = max(most, *slots.slot_bytes)
        self._writing_bytes = 0  # of slots that have left the candidates
        self.num_dropped = 0  # blocks that found no slot
        self.next_deadline: float | None = None  # monotonic seconds
        self._num_marks = max(NUM_MARKS, 4 * slots.num_slots)
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # targets that have a block, by its mark
        self._candidates: deque[_Candidate] = deque()
        self._queued: set[bytes] = set()  # names of candidates, and of slots to be written or being written
        self._ready: list[Write] = []
        self._jobs: dict[int, dict[int, Write]] = {}  # by job and slot
        self._job_numbers = count(1)

    @property
    def num_queued(self) -> int:
        """Number of blocks that are to be written or being written."""
        return len(self._queued)

    def is_queued(self, name: bytes) -> bool:
        return name in self._queued

    @property
    def can_store(self) -> bool:
        """Whether a candidate may be stored in the next step."""
        if not self._candidates:
            return False
        num_bytes = self._slots.slot_bytes[self._candidates[0].group]
        return self._writing_bytes + num_bytes <= self._max_writing_bytes

    # ── which ────────────────────────────────────────────────────────────────────────────────────────────────────

    def see(self, group: int, block: int, key: bytes, owner: int, *, is_computed: bool) -> None:
        """Record that a block was computed or found in the pool, and queue it if it is to be written, or drop it while
        there are MAX_CANDIDATES. A computed block was not found at the targets, so it is queued even if they should
        have it."""
        name = object_name(key, group)
        if not self.targets or name in self._queued:
            return
        if targets := self._missing_targets(name, owner, 0 if is_computed else self._kept.get(name[:MARK_BYTES], 0)):
            if len(self._candidates) >= MAX_CANDIDATES:
                self.num_dropped += 1
            else:
                self._queued.add(name)
                self._candidates.append(_Candidate(group, block, key, name, targets, owner))

    def _missing_targets(self, name: bytes, owner: int, kept: int) -> int:
        """Return the targets that a block is to be written to now; remember that it was seen, unless no target lacks
        it. kept: the targets that have it."""
        mark = name[:MARK_BYTES]
        wanted = self.targets & ~kept
        if owner and not self.writes_salted_remotely:
            wanted &= ~STORE_REMOTELY
        if not wanted:
            return 0
        if mark in self._seen:
            self._seen.move_to_end(mark)
            return wanted
        self._seen[mark] = None
        if len(self._seen) > self._num_marks:
            self._seen.popitem(last=False)
        return wanted & STORE_ON_DISK if len(self._candidates) < FIRST_SIGHT else 0

    def note_kept(self, names: Iterable[bytes], targets: int) -> None:
        """Record that `targets` have these blocks."""
        for name in names:
            mark = name[:MARK_BYTES]
            self._kept[mark] = self._kept.get(mark, 0) | targets
            self._kept.move_to_end(mark)
        while len(self._kept) > self._num_marks:
            self._kept.popitem(last=False)

    def forget(self) -> None:
        """Forget the blocks that were seen, the targets that have blocks, and all candidates."""
        self._seen.clear()
        self._kept.clear()
        self._drop_candidates()

    def _drop_candidates(self) -> None:
        self._queued.difference_update(each.name for each in self._candidates)
        self._candidates.clear()

    # ── when ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def plan_stores(self, limit: int) -> None:
        """Plan copies of at most `limit` candidates to slots in the next step, and writes of candidates after it. A
        candidate that is in a slot already needs no copy. One that the pool has evicted and no slot has is dropped, and
        so is one that finds no free slot."""
        while self.can_store and limit > 0:
            each = self._candidates.popleft()
            slot = self._slots.find(each.name)
            if slot is None and self._pools[each.group].holds(each.block, each.key):
                slot = self._plan.store(each.block, each.key, each.owner, each.group)
                limit -= 1
            if slot is None:
                self._queued.discard(each.name)
                self.num_dropped += 1
            else:
                self._plan.write(Write(each.key, each.name, slot, each.targets, each.owner))
                self._writing_bytes += self._slots.bytes_of(slot)

    def add(self, writes: list[Write], now: float) -> None:
        """Add slots that a step has filled to those that are ready to be written."""
        if writes and not self._ready:
            self.next_deadline = now + BATCH_S
        self._ready += writes

    def take(self, now: float, *, is_idle: bool) -> StoreBlocks | None:
        """Return the order to write the ready slots, if it is worth a wake-up; is_idle: no step is disturbed by it."""
        is_late = self.next_deadline is not None and now >= self.next_deadline
        if not self._ready or not (is_idle or is_late or self._is_batch()):
            return None
        ready, self._ready, self.next_deadline = self._ready, [], None
        writes = []
        for write in ready:
            if self._slots.name_of(write.slot) == write.name:
                writes.append(write)
            else:
                self._give_back(write)  # all content was cleared since
        if not writes:
            return None
        job = next(self._job_numbers)
        self._jobs[job] = {write.slot: write for write in writes}
        return StoreBlocks(
            job=job,
            keys=b"".join(write.name for write in writes),
            slots=encode_ids([write.slot for write in writes]),
            targets=bytes(write.targets for write in writes),
            owners=np.array([write.owner for write in writes], np.uint64).tobytes(),
        )

    def _is_batch(self) -> bool:
        """Return whether as many slots are ready as are written at once, or no more may become ready."""
        if len(self._ready) >= BATCH:
            return True
        ready_bytes = sum(self._slots.bytes_of(write.slot) for write in self._ready)
        return ready_bytes + max(self._slots.slot_bytes) > self._max_writing_bytes

    def on_stored(self, message: BlocksStored) -> None:
        """Take back slots that were written or dropped."""
        job = self._jobs.get(message.job, {})
        for slot, targets in zip(np.frombuffer(message.slots, np.int32).tolist(), message.targets, strict=True):
            write = job.pop(slot, None)
            if write is None:
                continue
            if targets:
                self.note_kept([write.name], targets)
            self._give_back(write)
        if message.is_last:
            for write in self._jobs.pop(message.job, {}).values():
                self._give_back(write)

    def _give_back(self, write: Write) -> None:
        """Release a written slot. Without a host tier, or while the pool has the block too, it is reused first."""
        self._end(write)
        self._slots.free([write.slot])
        pool = self._pools[self._slots.group_of(write.slot)]
        is_idle = self._slots.ref_count(write.slot) == 0 and self._slots.name_of(write.slot) == write.name
        if is_idle and (not self._is_host_tier or pool.lookup(write.key) is not None):
            self._slots.forget([write.slot])

    def _end(self, write: Write) -> None:
        self._queued.discard(write.name)
        self._writing_bytes -= self._slots.bytes_of(write.slot)

    def on_tier_lost(self) -> None:
        """Take back all slots: the process that wrote them has ended."""
        for job in self._jobs.values():
            for write in job.values():
                self._give_back(write)
        for write in self._ready:
            self._give_back(write)
        self._jobs.clear()
        self._ready, self.next_deadline = [], None
        self._drop_candidates()

    def on_steps_lost(self, writes: Iterable[Write]) -> None:
        """Forget writes of steps that may not have copied; the plan has released their slots."""
        for write in writes:
            self._end(write)

    def references(self) -> list[int]:
        """Return the slots that are to be written or being written, once for each reference."""
        writing = [write for job in self._jobs.values() for write in job.values()]
        return [write.slot for write in (*self._ready, *writing)]
