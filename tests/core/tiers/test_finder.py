"""Lookups: the run of blocks over all sources, and a slow source that delays no other lookup."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np

from tokenloom.core.kv.block_hash import block_keys
from tokenloom.core.tiers.finder import LIMIT_S, Finder
from tokenloom.core.tiers.source import Item, Namespace
from tokenloom.ipc.messages.tier import BlocksFound, FindBlocks, SourceName, SourceState
from tokenloom.tests.core.tiers.slots import DEADLINE_S
from tokenloom.tests.support.waiting import Deadline

ROOT = bytes(32)
DISK, REMOTE, PEER = range(3)


class SetSource:
    """A source with a set of keys; `gate` holds up lookups until it is set, at most until their deadline."""

    num_loaders = load_batch = store_batch = 1

    def __init__(self, name: SourceName) -> None:
        self.name = name
        self.keys: set[bytes] = set()
        self.asked: list[int] = []  # number of keys of each lookup
        self.gate = threading.Event()
        self.gate.set()
        self.is_broken = False

    def find(self, keys: Sequence[bytes], deadline: float) -> int:
        self.asked.append(len(keys))
        if self.is_broken:
            raise RuntimeError("a bug")
        if not self.gate.wait(max(deadline - time.monotonic(), 0)):
            return 0
        return next((index for index, key in enumerate(keys) if key not in self.keys), len(keys))

    def open(self, namespace: Namespace) -> None: ...

    def load(self, items: Sequence[Item], deadline: float, on_loaded: Callable[[int, bool], None]) -> None: ...

    def store(self, items: Sequence[Item]) -> list[bool]:
        return []

    def clear(self) -> None: ...

    def state(self) -> SourceState:
        return SourceState(name=self.name)

    def close(self) -> None: ...


class Bench:
    """A finder over these sources, and its answers in order."""

    def __init__(self, *places: int) -> None:
        names: list[SourceName] = ["disk", "remote", "peer"]
        self.sources = {place: SetSource(names[place]) for place in places}
        self.answers: SimpleQueue[BlocksFound] = SimpleQueue()
        self.finder = Finder(self.sources, self.answers.put)

    def put(self, holders: Sequence[Sequence[int]], seed: int = 0) -> bytes:
        """Give each block of a prompt to its holders; return the prompt's tokens, 4 in a block."""
        tokens = np.random.default_rng(seed).integers(0, 1000, 4 * len(holders), dtype=np.int32).tobytes()
        for key, places in zip(block_keys(ROOT, tokens, 4), holders, strict=True):
            for place in places:
                self.sources[place].keys.add(key)
        return tokens

    def ask(self, tokens: bytes, serial: int = 1, skips_remote: bool = False) -> None:
        self.finder.find(
            FindBlocks(serial=serial, parent=ROOT, token_ids=tokens, block_size=4, skips_remote=skips_remote)
        )

    def answer(self) -> list[int]:
        return list(self.answers.get(timeout=DEADLINE_S).sources)


def test_the_run_goes_on_over_all_sources() -> None:
    bench = Bench(DISK, REMOTE, PEER)
    tokens = bench.put([[0], [0, 1], [1], [2], [0], [1], [], [0]])
    bench.ask(tokens)
    assert bench.answer() == [0, 0, 1, 2, 0, 1]
    bench.ask(tokens, skips_remote=True)
    assert bench.answer() == [0, 0]
    bench.ask(b"")
    assert bench.answer() == []


def test_the_disk_is_asked_once_and_others_only_for_the_blocks_that_it_lacks() -> None:
    bench = Bench(DISK, REMOTE)
    bench.ask(bench.put([[0]] * 6))
    assert bench.answer() == [0] * 6 and bench.sources[REMOTE].asked == []
    bench.ask(bench.put([[0], [0], [1], [1], [], []], seed=1))
    assert bench.answer() == [0, 0, 1, 1]
    assert bench.sources[REMOTE].asked == [4] and bench.sources[DISK].asked == [6, 6, 2]


def test_a_slow_remote_delays_no_lookup_that_the_disk_answers() -> None:
    bench = Bench(DISK, REMOTE)
    bench.sources[REMOTE].gate.clear()
    slow, fast = bench.put([[0], [1]]), bench.put([[0], [0]], seed=1)
    begun, deadline = time.monotonic(), Deadline(2.5 * LIMIT_S)
    for serial in range(6):
        bench.ask(slow if serial % 2 == 0 else fast, serial)
    answers = [bench.answers.get(timeout=DEADLINE_S) for _ in range(6)]
    assert [answer.serial for answer in answers] == [1, 3, 5, 0, 2, 4]
    assert [list(answer.sources) for answer in answers] == [[0, 0]] * 3 + [[0]] * 3, "with the blocks found in time"
    assert time.monotonic() >= begun + LIMIT_S * 0.9 and not deadline.has_passed(), "all of them within one deadline"
    bench.sources[REMOTE].gate.set()
    bench.ask(slow)
    assert bench.answer() == [0, 1]


def test_a_source_that_raises_counts_as_empty() -> None:
    bench = Bench(DISK, REMOTE, PEER)
    tokens = bench.put([[0], [2]])
    bench.sources[REMOTE].is_broken = True
    bench.ask(tokens)
    assert bench.answer() == [0, 2]
    bench.sources[DISK].is_broken = True
    bench.ask(tokens)
    assert bench.answer() == []
