"""Lookups: the largest boundary over all sources, as the hit rule has it, and a slow source that delays no other
lookup."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np
import pytest

from tokenloom.core.kv.block_hash import block_keys, object_name
from tokenloom.core.kv.hit_rule import longest_hit
from tokenloom.core.tiers import finder
from tokenloom.core.tiers.finder import LIMIT_S, Finder
from tokenloom.core.tiers.source import Item, Namespace
from tokenloom.ipc.messages.tier import HERE, BlocksFound, FindBlocks, FindGroup, SourceName, SourceState
from tokenloom.tests.core.tiers.slots import DEADLINE_S, SLOT_BYTES
from tokenloom.tests.support.today import some
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
        self.hinted: list[int] = []
        self.gives_hints = True
        self.gate = threading.Event()
        self.gate.set()
        self.is_broken = False

    def find(self, keys: Sequence[bytes], num_bytes: int, deadline: float) -> int:
        self.asked.append(len(keys))
        if self.is_broken:
            raise RuntimeError("a bug")
        if not self.gate.wait(max(deadline - time.monotonic(), 0)):
            return 0
        return next((index for index, key in enumerate(keys) if key not in self.keys), len(keys))

    def may_have(self, keys: Sequence[bytes], num_bytes: int, deadline: float) -> list[bool]:
        self.hinted.append(len(keys))
        if not self.gate.wait(max(deadline - time.monotonic(), 0)):
            return [False] * len(keys)
        return [key in self.keys or not self.gives_hints for key in keys]

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

    def __init__(self, *places: int, num_groups: int = 1) -> None:
        names: list[SourceName] = ["disk", "remote", "peer"]
        self.sources = {place: SetSource(names[place]) for place in places}
        self.answers: SimpleQueue[BlocksFound] = SimpleQueue()
        self.finder = Finder(self.sources, (SLOT_BYTES,) * num_groups, self.answers.put)

    def put(self, holders: Sequence[Sequence[int]], seed: int = 0) -> bytes:
        """Give each block of a prompt to its holders; return the prompt's tokens, 4 in a block."""
        tokens = np.random.default_rng(seed).integers(0, 1000, 4 * len(holders), dtype=np.int32).tobytes()
        for key, places in zip(block_keys(ROOT, tokens, 4), holders, strict=True):
            for place in places:
                self.sources[place].keys.add(key)
        return tokens

    def ask(self, tokens: bytes, serial: int = 1, skips_remote: bool = False) -> None:
        self.finder.find(
            FindBlocks(
                serial=serial,
                parent=ROOT,
                token_ids=tokens,
                block_size=4,
                groups=[FindGroup()],
                skips_remote=skips_remote,
            )
        )

    def answer(self) -> list[int]:
        answer = self.answers.get(timeout=DEADLINE_S)
        (sources,) = answer.sources
        assert answer.end == len(sources)
        return list(sources)


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
    assert [list(answer.sources[0]) for answer in answers] == [[0, 0]] * 3 + [[0]] * 3, "with the blocks found in time"
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


# ── several groups ───────────────────────────────────────────────────────────────────────────────────────────────────


def answer_to(question: FindBlocks, sources: dict[int, SetSource], near: Sequence[int]) -> BlocksFound:
    """Return the answer of a lookup that asks the sources in `near`, then all; it has as much time as it takes."""
    lookup = finder._Lookup(question, [SLOT_BYTES] * len(question.groups))
    lookup.deadline = time.monotonic() + DEADLINE_S
    lookup.make_keys()
    lookup.search({number: sources[number] for number in near})
    lookup.search(sources)
    return lookup.answer()


@pytest.mark.parametrize("seed", some(range(300), 60))
def test_the_answer_is_the_largest_boundary_that_suits_all_groups(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks, first = rng.randrange(40), rng.choice([0, 3])
    tokens = np.random.default_rng(seed).integers(0, 1000, 4 * num_blocks, dtype=np.int32).tobytes()
    needed = [rng.choice([0, 0, 5]), *(rng.choice([1, 2, 4, 50]) for _ in range(rng.randrange(4)))]
    shares = [rng.choice([0.5, 0.9, 0.98, 1.0]) for _ in needed]
    keys = list(block_keys(ROOT, tokens, 4, start=4 * first))
    sources = {number: SetSource("disk") for number in rng.sample(range(3), rng.randint(1, 3))}
    for source in sources.values():
        source.gives_hints = rng.random() < 0.7
    holders: list[list[set[int]]] = []  # by group and block: the sources that have it
    groups = []
    for group, (count, share) in enumerate(zip(needed, shares, strict=True)):
        here = bytes(rng.random() < 0.3 for _ in keys) if rng.random() < 0.7 else b""
        groups.append(FindGroup(needed=count, here=here))
        holders.append([])
        for key in keys:
            places = {number for number in sources if rng.random() < 0.6} if rng.random() < share else set[int]()
            holders[group].append(places)
            for number in places:
                sources[number].keys.add(object_name(key, group))
    least = rng.choice([0, first, first + num_blocks // 2])
    question = FindBlocks(
        serial=seed,
        parent=ROOT,
        token_ids=tokens,
        block_size=4,
        groups=groups,
        least=least,
        start=4 * first,
    )

    def has(group: int, index: int) -> bool:
        return bool(holders[group][index]) or groups[group].here[index : index + 1] == b"\1"

    hit = longest_hit(num_blocks, [count or None for count in needed], has)
    end = first + hit.num_blocks
    answer = answer_to(question, sources, [number for number in sources if number == DISK])
    if end <= least:
        assert answer.end <= least and answer.sources == [b""] * len(needed)
        return
    assert answer.end == end
    assert answer.deepest == (first + hit.deepest if hit.deepest > hit.num_blocks else 0)
    for group, count in enumerate(needed):
        begin = max(end - count, first) if count else first
        assert len(answer.sources[group]) == end - begin
        for index, number in enumerate(answer.sources[group], begin - first):
            is_here = groups[group].here[index : index + 1] == b"\1"
            assert number == HERE if is_here else number in holders[group][index]


def test_a_boundary_beyond_which_none_is_of_use_is_not_asked_for() -> None:
    bench = Bench(DISK, num_groups=2)
    tokens = bench.put([[0]] * 8 + [[]] * 8)
    groups = [FindGroup(), FindGroup(needed=2)]
    answers = []
    for least in (8, 0):
        question = FindBlocks(serial=1, parent=ROOT, token_ids=tokens, block_size=4, groups=groups, least=least)
        bench.finder.find(question)
        answers.append(bench.answers.get(timeout=DEADLINE_S))
    assert [answer.sources for answer in answers] == [[b"", b""]] * 2
    disk = bench.sources[DISK]
    assert disk.asked == [16, 16, 2] and disk.hinted == [6], "with least 8 there is no window to ask for"


@pytest.mark.parametrize("gives_hints", [True, False])
def test_a_boundary_far_before_the_last_takes_few_questions_to_sources_that_give_hints(gives_hints: bool) -> None:
    bench = Bench(REMOTE, num_groups=2)
    remote = bench.sources[REMOTE]
    remote.gives_hints = gives_hints
    tokens = bench.put([[1]] * 400)
    remote.keys.add(object_name(list(block_keys(ROOT, tokens, 4))[99], 1))  # the state after 100 blocks
    groups = [FindGroup(), FindGroup(needed=1)]
    bench.finder.find(FindBlocks(serial=1, parent=ROOT, token_ids=tokens, block_size=4, groups=groups))
    answer = bench.answers.get(timeout=DEADLINE_S)
    assert answer == BlocksFound(serial=1, sources=[b"\1" * 100, b"\1"], end=100, deepest=400)
    assert remote.asked == [400, *[1] * (2 if gives_hints else 301)] and remote.hinted == [64] * 5


def test_when_time_is_up_the_answer_is_the_largest_boundary_that_is_known() -> None:
    """The disk has all of six blocks, the remote store further keys, but not their states; the disk has a state after
    two blocks."""
    bench = Bench(DISK, REMOTE, num_groups=2)
    tokens = bench.put([[0]] * 6 + [[1]] * 4)
    keys = list(block_keys(ROOT, tokens, 4))
    bench.sources[DISK].keys.add(object_name(keys[1], 1))
    bench.sources[REMOTE].gate.clear()
    groups = [FindGroup(), FindGroup(needed=1, here=b"")]
    bench.finder.find(FindBlocks(serial=1, parent=ROOT, token_ids=tokens, block_size=4, groups=groups))
    assert bench.answers.get(timeout=DEADLINE_S) == BlocksFound(
        serial=1, sources=[bytes(2), bytes(1)], end=2, deepest=6
    )
    bench.sources[REMOTE].gate.set()
    bench.sources[REMOTE].keys.add(object_name(keys[8], 1))
    bench.finder.find(FindBlocks(serial=2, parent=ROOT, token_ids=tokens, block_size=4, groups=groups))
    assert bench.answers.get(timeout=DEADLINE_S) == BlocksFound(
        serial=2, sources=[bytes([0] * 6 + [1] * 3), b"\1"], end=9, deepest=10
    )
