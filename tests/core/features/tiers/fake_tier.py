"""A tier process without files or sockets: the test says when it reads, writes, answers, fails and dies.

It keeps the content of blocks by key, as the FakeWorker's arena holds it. A slot is read or written when its job is
done, not when it is ordered: if the core gave the slot to anybody else meanwhile, the wrong content shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tokenloom.core.kv.block_hash import KEY_BYTES, block_keys, object_name
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.messages.tier import (
    HERE,
    BlocksFound,
    BlocksLoaded,
    BlocksStored,
    CancelLoad,
    ClearTier,
    CoreToTier,
    FindBlocks,
    LoadBlocks,
    OpenTier,
    StoreBlocks,
    TierCleared,
    TierOpened,
    TierToCore,
)

NAMESPACE = bytes(range(32))
Content = tuple[object, ...]


@dataclass
class Job:
    """Slots that belong to the tier process."""

    number: int
    keys: dict[int, bytes]  # by slot
    targets: dict[int, int]
    is_load: bool
    is_cancelled: bool = False


class FakeTier:
    """Holds the messages of the core until `act` takes one."""

    def __init__(self, arena: dict[int, Content], tell: Callable[[TierToCore], None], rng: random.Random) -> None:
        """arena: content by slot. tell: the core's receiver."""
        self.arena, self._tell, self._rng = arena, tell, rng
        self.objects: dict[tuple[int, bytes], Content] = {}  # by source and key
        self.queue: list[CoreToTier] = []
        self.jobs: list[Job] = []
        self.bad_share = self.lost_share = 0.0  # of blocks whose load fails; of objects that vanish before
        self.num_loaded = self.num_stored = self.num_questions = 0

    def send(self, message: CoreToTier) -> None:
        self.queue.append(message)

    @property
    def owned_slots(self) -> set[int]:
        return {slot for job in self.jobs for slot in job.keys}

    def act(self) -> bool:
        """Take one message of the core, or go on with a job; False if there is nothing to do."""
        if self.queue and (not self.jobs or self._rng.random() < 0.6):
            self._obey(self.queue.pop(0))
        elif self.jobs:
            self._work(self._rng.choice(self.jobs))
        else:
            return False
        return True

    def _obey(self, message: CoreToTier) -> None:
        if isinstance(message, OpenTier):
            self._tell(TierOpened(serial=message.serial, namespace=NAMESPACE))
        elif isinstance(message, FindBlocks):
            self._find(message)
        elif isinstance(message, (LoadBlocks, StoreBlocks)):
            keys = [message.keys[i : i + KEY_BYTES] for i in range(0, len(message.keys), KEY_BYTES)]
            slots = list(decode_ids(message.slots))
            is_load = isinstance(message, LoadBlocks)
            targets = list(message.sources if isinstance(message, LoadBlocks) else message.targets)
            assert not self.owned_slots & set(slots), "a slot is given to two jobs"
            job = Job(message.job, dict(zip(slots, keys, strict=True)), dict(zip(slots, targets, strict=True)), is_load)
            assert len(job.keys) == len(slots), "a slot stands twice in a job"
            self.jobs.append(job)
        elif isinstance(message, CancelLoad):
            for job in self.jobs:
                job.is_cancelled |= job.number == message.job and job.is_load
        elif isinstance(message, ClearTier):
            self.objects.clear()
            for job in self.jobs:
                job.is_cancelled = True
            self._tell(TierCleared(serial=message.serial))

    def _find(self, message: FindBlocks) -> None:
        """Try all boundaries, the largest first."""
        self.num_questions += 1
        keys = list(block_keys(message.parent, message.token_ids, message.block_size, message.media, message.start))
        first = message.start // message.block_size
        lacking = (i for i, key in enumerate(keys) if self._source(message, 0, key, i) is None)
        deepest = first + next(lacking, len(keys))
        for end in range(len(keys), max(message.least - first, 0), -1):
            found = []
            for group, asked in enumerate(message.groups):
                blocks = range(max(end - asked.needed, 0) if asked.needed else 0, end)
                found.append([self._source(message, group, keys[i], i) for i in blocks])
            if not any(None in each for each in found):
                sources = [bytes(source for source in each if source is not None) for each in found]
                self._tell(BlocksFound(serial=message.serial, sources=sources, end=first + end, deepest=deepest))
                return
        self._tell(
            BlocksFound(serial=message.serial, sources=[b""] * len(message.groups), end=message.least, deepest=deepest)
        )

    def _source(self, message: FindBlocks, group: int, key: bytes, i: int) -> int | None:
        here, name = message.groups[group].here, object_name(key, group)
        if here and here[i]:
            return HERE
        sources = (0,) if message.skips_remote else (0, 1)
        return next((source for source in sources if (source, name) in self.objects), None)

    def _work(self, job: Job) -> None:
        """End the work on some slots of a job."""
        slots = self._rng.sample(list(job.keys), self._rng.randint(1, len(job.keys)))
        if job.is_load:
            good = [slot for slot in slots if self._load(job, slot)]
            bad = [slot for slot in slots if slot not in good]
        else:
            kept = bytes(self._store(job, slot) for slot in slots)
        for slot in slots:
            del job.keys[slot]
        is_last = not job.keys
        if is_last:
            self.jobs.remove(job)
        if job.is_load:
            self._tell(BlocksLoaded(job=job.number, slots=encode_ids(good), bad_slots=encode_ids(bad), is_last=is_last))
        else:
            self._tell(BlocksStored(job=job.number, slots=encode_ids(slots), targets=kept, is_last=is_last))

    def _load(self, job: Job, slot: int) -> bool:
        place = job.targets[slot], job.keys[slot]
        if self._rng.random() < self.lost_share:
            self.objects.pop(place, None)
        if job.is_cancelled or place not in self.objects or self._rng.random() < self.bad_share:
            self.arena[slot] = ("garbage", self._rng.random())  # half a block was written
            return False
        self.arena[slot] = self.objects[place]
        self.num_loaded += 1
        return True

    def _store(self, job: Job, slot: int) -> int:
        is_good = not job.is_cancelled and self._rng.random() >= self.bad_share
        targets = job.targets[slot] if is_good else 0
        for source in (0, 1):
            if targets & (1 << source):
                self.objects[source, job.keys[slot]] = self.arena[slot]
                self.num_stored += 1
        return targets

    def die(self) -> None:
        """Forget messages and jobs, as when the process is killed; half of the slots being loaded are garbage."""
        for job in self.jobs:
            for slot in job.keys if job.is_load else ():
                if self._rng.random() < 0.5:
                    self.arena[slot] = ("garbage", self._rng.random())
        self.queue.clear()
        self.jobs.clear()
