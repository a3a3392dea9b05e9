"""Stores of KV blocks under measurement: sources of the tier process, adapters of LMCache, and bare files.

All store the same blocks and load them into slots of their own process. Files and Values are the places where their
objects lie; they damage objects behind the store's back.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from redis import Redis

from tokenloom.core.tiers.object_format import HEADER_BYTES
from tokenloom.core.tiers.source import Item, Namespace, Source
from tokenloom.scripts.bench.cases.tiers import wait_until
from tokenloom.scripts.bench.contestant import Peer

NUM_BLOCKS, BLOCK_BYTES = 256, 360 << 10  # 16 tokens of the 135M model in bfloat16
NUM_BYTES = NUM_BLOCKS * BLOCK_BYTES
STARTS = range(0, NUM_BYTES, BLOCK_BYTES)
WAIT_S = 30.0


class Loaded(NamedTuple):
    """A load of all blocks: seconds, blocks reported as good, blocks whose bytes are the stored ones."""

    seconds: float
    num_good: int
    num_equal: int


class Store(Protocol):
    """A store of blocks under measurement. Each round has names of its own."""

    def store(self, number: int) -> float:
        """Return the seconds to store all blocks."""
        ...

    def load(self, number: int) -> Loaded: ...


class Slots:
    """Owner of the page-aligned places of all blocks, from which they are stored and into which they are loaded."""

    def __init__(self, content: bytes) -> None:
        self._content, self._memory = content, mmap.mmap(-1, NUM_BYTES)
        self.views = [memoryview(self._memory)[start : start + BLOCK_BYTES] for start in STARTS]

    def fill(self) -> None:
        self._memory[:] = self._content

    def clear(self) -> None:
        self._memory[:] = bytes(NUM_BYTES)

    def num_equal(self) -> int:
        views = zip(STARTS, self.views, strict=True)
        return sum(self._content[start : start + BLOCK_BYTES] == view for start, view in views)


class Ours:
    """A source of the tier process, called with the same number of threads and the same size of batches as there."""

    def __init__(self, source: Source, slots: Slots) -> None:
        self._source, self._slots = source, slots
        source.open(Namespace(hashlib.sha256(b"benchmark").digest(), b"", BLOCK_BYTES))
        wait_until(lambda: source.state().is_open, f"the {source.name} does not open: {source.state().error}")

    def store(self, number: int) -> float:
        self._slots.fill()
        begun = time.perf_counter()
        stored = [self._source.store(batch) for batch in self._batches(number, self._source.store_batch)]
        seconds = time.perf_counter() - begun
        assert all(map(all, stored)), f"not all blocks were stored: {self._source.state()}"
        return seconds

    def load(self, number: int) -> Loaded:
        self._slots.clear()
        good: list[bool] = []
        with ThreadPoolExecutor(self._source.num_loaders) as threads:
            begun = time.perf_counter()
            deadline = time.monotonic() + WAIT_S
            for _ in threads.map(
                lambda batch: self._source.load(batch, deadline, lambda _, is_good: good.append(is_good)),
                self._batches(number, self._source.load_batch),
            ):
                pass
            seconds = time.perf_counter() - begun
        assert len(good) == NUM_BLOCKS
        return Loaded(seconds, good.count(True), self._slots.num_equal())

    def _batches(self, number: int, size: int) -> list[list[Item]]:
        keys = [hashlib.sha256(b"%d %d" % (number, block)).digest() for block in range(NUM_BLOCKS)]
        items = [Item(key, slot) for key, slot in zip(keys, self._slots.views, strict=True)]
        return [items[start : start + size] for start in range(0, NUM_BLOCKS, size)]


class Bare:
    """Store with one file for each block, written and read by one thread without any check."""

    def __init__(self, folder: Path, slots: Slots) -> None:
        self._folder, self._slots = folder, slots
        folder.mkdir()

    def store(self, number: int) -> float:
        self._slots.fill()
        return self._run(number, os.O_WRONLY | os.O_CREAT, lambda fd, slot: os.pwritev(fd, [slot], 0))

    def load(self, number: int) -> Loaded:
        self._slots.clear()
        seconds = self._run(number, os.O_RDONLY, lambda fd, slot: os.preadv(fd, [slot], 0))
        return Loaded(seconds, NUM_BLOCKS, self._slots.num_equal())

    def _run(self, number: int, flags: int, move: Callable[[int, memoryview], int]) -> float:
        begun = time.perf_counter()
        for block, slot in enumerate(self._slots.views):
            fd = os.open(self._folder / f"{number}-{block}", flags | os.O_DIRECT, 0o600)
            assert move(fd, slot) == BLOCK_BYTES
            os.close(fd)
        return time.perf_counter() - begun


class Theirs:
    """An adapter of LMCache in the peer's process."""

    def __init__(self, peer: Peer, name: str, **config: object) -> None:
        self._peer, self._name = peer, name
        peer.ask({"open": name, **config})

    def store(self, number: int) -> float:
        answer = self._peer.ask({"store": self._name, "round": number})
        assert answer["num_good"] == NUM_BLOCKS, f"{self._name} did not store all blocks"
        return float(answer["seconds"])

    def load(self, number: int) -> Loaded:
        return Loaded(**self._peer.ask({"load": self._name, "round": number}))


class Place(Protocol):
    """The place where stored objects lie."""

    def flip_bits(self, draw: random.Random, count: int) -> None:
        """Flip one bit in the content of `count` objects."""
        ...

    def clear(self) -> None: ...


class Files:
    """The files of objects below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def flip_bits(self, draw: random.Random, count: int) -> None:
        for path in draw.sample(self._objects(), count):
            with path.open("r+b") as file:
                place = draw.randrange(HEADER_BYTES, BLOCK_BYTES)
                file.seek(place)
                (old,) = file.read(1)
                file.seek(place)
                file.write(bytes([old ^ 1 << draw.randrange(8)]))

    def clear(self) -> None:
        for path in self._objects():
            path.unlink()

    def _objects(self) -> list[Path]:
        return sorted(path for path in self._folder.rglob("*") if path.is_file() and path.stat().st_size >= BLOCK_BYTES)


class Values:
    """The values of a Redis server that has nothing else."""

    def __init__(self, port: int) -> None:
        self._redis = Redis(port=port)

    def flip_bits(self, draw: random.Random, count: int) -> None:
        for name in draw.sample(sorted(self._redis.keys()), count):
            bit = draw.randrange(8 * HEADER_BYTES, 8 * BLOCK_BYTES)
            self._redis.setbit(name, bit, 1 - self._redis.getbit(name, bit))

    def clear(self) -> None:
        self._redis.flushall()
