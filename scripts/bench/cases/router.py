"""Measure the router by itself: microseconds of a choice and of a send, by the number of cores, and the index's memory.

    engine-launch bench router

Prompts have 12k tokens, and a quarter of them begins like an earlier one. Before the timing each core is sent 400
prompts, or as many as fill the index. A core has 8 open answers. Memory is counted by tracemalloc.
"""

from __future__ import annotations

import random
import time
import tracemalloc

from tokenloom.frontend.server.replicas.prefix_index import MAX_ENTRIES, PrefixIndex
from tokenloom.frontend.server.replicas.prefix_keys import KEY_TOKENS
from tokenloom.frontend.server.replicas.router import Router
from tokenloom.scripts.bench.report import percentile
from tokenloom.scripts.bench.runner import Case, Setup

NUM_TOKENS = 12_000
NUM_KEYS = NUM_TOKENS // KEY_TOKENS


class Load:
    """Prompts of one seed, of which a quarter begin like an earlier one, sent to a router."""

    def __init__(self, num_cores: int, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._chains: list[list[int]] = []
        self.router = Router(seed=seed)
        for core in range(num_cores):
            self.router.add(core, 500_000)
        self.number = 0

    def keys(self) -> list[int]:
        """Return the keys of the next prompt."""
        draw = self._random
        keys = [draw.getrandbits(64) for _ in range(NUM_KEYS)]
        if self._chains and draw.random() < 0.25:
            shared = draw.randrange(1, NUM_KEYS)
            keys[:shared] = draw.choice(self._chains)[:shared]
        self._chains.append(keys)
        del self._chains[:-10_000]
        return keys

    def request(self, keys: list[int]) -> tuple[float, float]:
        """Route a request and finish an earlier one; return the seconds of the choice, and of the notices up to the
        first token."""
        now, router = float(self.number), self.router
        begun_at = time.perf_counter()
        core = router.pick(keys, NUM_TOKENS, now)
        picked_at = time.perf_counter()
        assert core is not None
        router.on_sent(self.number, core, keys, NUM_TOKENS, now)
        router.on_started(self.number, 0)
        router.on_first_token(self.number, now + 1.0)
        ended_at = time.perf_counter()
        if self.number >= 8 * len(router.loads):  # so that as many are open at each core
            router.on_finished(self.number - 8 * len(router.loads), 300, now + 5.0)
        self.number += 1
        return picked_at - begun_at, ended_at - picked_at


def index_bytes(num_entries: int) -> tuple[int, int]:
    """Return the bytes of a full index, and its entries."""
    draw = random.Random(0)
    tracemalloc.start()
    index = PrefixIndex(num_entries)
    for number in range(num_entries // NUM_KEYS + 2):
        index.add(number % 8, [draw.getrandbits(64) for _ in range(NUM_KEYS)], number * NUM_TOKENS)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size, index.num_entries


def measure(setup: Setup) -> None:
    arguments, report = setup.arguments, setup.report
    for num_cores in arguments.cores:
        load = Load(num_cores)
        for _ in range(min(400 * num_cores, MAX_ENTRIES // NUM_KEYS)):
            load.request(load.keys())
        times = [load.request(load.keys()) for _ in range(arguments.num_requests)]
        picks, notes = ([1e6 * each for each in column] for column in zip(*times, strict=True))
        report.add(
            cores=num_cores,
            pick_p50_us=percentile(picks, 50),
            pick_p99_us=percentile(picks, 99),
            notes_p50_us=percentile(notes, 50),
            entries=load.router.index.num_entries,
        )
    size, num_entries = index_bytes(MAX_ENTRIES)
    report.note("full index, MB", size / 1e6)
    report.note("its entries", num_entries)


CASE = Case("router", measure, {"--cores": ([8, 64, 1000],), "--requests": (2000,)}, model="", rounds=0)
