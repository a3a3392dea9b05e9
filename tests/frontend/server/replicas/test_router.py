"""Laws of the router: the cores that it may pick, how load spreads, and how fast requests are resumed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from itertools import count

import pytest

from tokenloom.frontend.server.replicas.core_load import CoreLoad, OthersLoad
from tokenloom.frontend.server.replicas.resume_pacer import FACTOR, WINDOW_S, ResumePacer
from tokenloom.frontend.server.replicas.router import FIRST_RATE, NUM_CANDIDATES, Router
from tokenloom.tests.support.today import seeds

KEY = 128
RATE = 10_000.0  # prompt tokens per second of a core


class CountingLoads(dict[int, CoreLoad]):
    """Loads that count how many are read."""

    num_reads = 0

    def __getitem__(self, core: int) -> CoreLoad:
        self.num_reads += 1
        return super().__getitem__(core)


class Cores:
    """Cores in virtual time: each computes one prompt after the other at its rate, then the answer."""

    def __init__(self, router: Router, rates: Mapping[int, float], cached: int = 0) -> None:
        self.router, self.rates, self.cached = router, rates, cached
        self.free_at = dict.fromkeys(rates, 0.0)
        self.events: list[tuple[float, int, str]] = []
        self.computed = Counter[int]()
        self._ids = count()
        for core in rates:
            router.add(core)

    def request(self, keys: list[int], num_tokens: int, now: float, answer_s: float = 0.5) -> int:
        self.run(now)
        core = self.router.pick(keys, num_tokens, now)
        assert core is not None
        request_id = next(self._ids)
        self.router.on_sent(request_id, core, keys, num_tokens, now)
        new = num_tokens - self.router.open[request_id].num_expected
        self.computed[core] += new
        self.free_at[core] = max(self.free_at[core], now) + new / self.rates[core]
        self.events += [(self.free_at[core], request_id, "first"), (self.free_at[core] + answer_s, request_id, "end")]
        return core

    def run(self, now: float) -> None:
        due = sorted(event for event in self.events if event[0] <= now)
        self.events = [event for event in self.events if event[0] > now]
        for at, request_id, kind in due:
            if kind == "first":
                self.router.on_first_token(request_id, at)
            else:
                self.router.on_finished(request_id, 50, at)


def fresh_keys(draw: random.Random, num_tokens: int) -> list[int]:
    return [draw.getrandbits(64) for _ in range(num_tokens // KEY)]


@pytest.mark.parametrize("seed", seeds(3, 10))
def test_a_lost_a_draining_or_an_excluded_core_is_never_picked(seed: int) -> None:
    draw, router, ids = random.Random(seed), Router(seed=seed), count()
    up, draining = set[int](), set[int]()
    chains: list[list[int]] = [[]]
    for step in range(400):
        core = draw.randrange(20)
        match draw.choice(["add", "lose", "drain", "resume", "clear", "send", "send", "send", "end"]):
            case "add" if core not in up:
                router.add(core, draw.choice([None, 5_000]))
                up.add(core)
                draining.discard(core)
            case "lose" if core in up:
                expected = [each for each, sent in router.open.items() if sent.core == core]
                assert router.lose(core) == expected
                up.discard(core)
            case "drain" if core in up:
                router.drain(core)
                draining.add(core)
            case "resume" if core in up:
                router.resume(core)
                draining.discard(core)
            case "clear" if core in up:
                router.clear_cache(core)
            case "send":
                keys = draw.choice(chains)[: draw.randint(0, 9)] + fresh_keys(draw, KEY * draw.randint(0, 9))
                chains.append(keys)
                without = draw.randrange(20)
                picked = router.pick(keys, KEY * len(keys) + 1, step, without)
                usable = up - draining
                assert (picked is None) == (not usable)
                assert picked is None or (picked in usable and (picked != without or usable == {without}))
                if picked is not None:
                    router.on_sent(next(ids), picked, keys, KEY * len(keys) + 1, step)
            case "end" if router.open:
                router.on_finished(draw.choice(list(router.open)), draw.randint(0, 500), step)
    for request_id in list(router.open):
        router.on_finished(request_id, 1, 400)
    loads = router.loads.values()
    assert all((load.num_open, load.num_waiting_tokens, load.waiting) == (0, 0, {}) for load in loads)


@pytest.mark.parametrize("num_cores", [2, 3, 8, 50])
@pytest.mark.parametrize("num_shared", [0, 2])
def test_load_stays_within_twice_the_mean_if_little_is_shared(num_cores: int, num_shared: int) -> None:
    draw = random.Random(num_cores)
    cores = Cores(Router(), dict.fromkeys(range(num_cores), RATE))
    system_prompt = fresh_keys(draw, KEY * num_shared)
    now = 0.0
    for _ in range(60 * num_cores):
        num_tokens = draw.randint(500, 4000)
        now += draw.expovariate(0.6 * num_cores * RATE / 2250)
        cores.request(system_prompt + fresh_keys(draw, num_tokens - KEY * num_shared), num_tokens, now)
    mean = sum(cores.computed.values()) / num_cores
    assert max(cores.computed.values()) <= 2 * mean
    assert num_shared or len(cores.computed) == num_cores


def test_a_conversation_stays_until_its_core_has_a_long_queue() -> None:
    draw = random.Random(0)
    cores = Cores(Router(), dict.fromkeys(range(8), RATE))
    keys, now = fresh_keys(draw, 2000), 0.0
    first = cores.request(keys, 2000, now)
    for _ in range(10):
        now += 10.0
        keys = keys + fresh_keys(draw, 500)
        assert cores.request(keys, KEY * len(keys), now) == first
    for request_id in range(1000, 1060):
        cores.router.on_sent(request_id, first, fresh_keys(draw, 4000), 4000, now)
    assert cores.request(keys, KEY * len(keys), now) != first


def test_a_core_that_forgets_is_believed_to_hold_less() -> None:
    draw, router, ids = random.Random(0), Router(), count()
    router.add(0)

    def send(keys: list[int], cached: int) -> int:
        """Send and finish a request of which the core has `cached` tokens; return how many were expected."""
        request_id, num_tokens = next(ids), KEY * len(keys) + 1
        router.on_sent(request_id, 0, keys, num_tokens, 0.0)
        expected = router.open[request_id].num_expected
        router.on_started(request_id, cached)
        router.on_first_token(request_id, 1.0)
        router.on_finished(request_id, 0, 2.0)
        return expected

    chains = [fresh_keys(draw, 20 * KEY) for _ in range(10)]
    for keys in chains:
        assert send(keys, 0) == 0
    assert send(chains[0], 0) == 20 * KEY, "nothing has told yet how much fits"
    assert [send(keys, 0) for keys in chains[1:]] == [0] * 9, "prompts as old as the one that was gone are gone, too"
    capacity = router.loads[0].capacity_tokens
    assert send(chains[9], 20 * KEY) == 20 * KEY, "the newest is still there"
    assert send(chains[0], 20 * KEY) == 0, "as old as the one that was gone"
    grown = router.loads[0].capacity_tokens
    assert grown is not None and capacity is not None and grown > capacity, "but it was found"
    assert send(chains[1], 20 * KEY) == 20 * KEY


def test_a_new_or_cleared_core_is_believed_to_hold_nothing() -> None:
    router, keys = Router(), list(range(50))
    for core in range(2):
        router.add(core)
        router.on_sent(core, core, keys, 50 * KEY, 0.0)
        router.on_first_token(core, 1.0)
    router.clear_cache(0)
    assert router.lose(1) == [1]
    router.add(1)
    for core in range(2):
        router.on_sent(10 + core, core, keys, 50 * KEY, 2.0)
        assert router.open[10 + core].num_expected == 0
        router.on_sent(20 + core, core, keys, 50 * KEY, 2.0)
        assert router.open[20 + core].num_expected == 50 * KEY - 1


def test_a_slow_core_gets_as_much_less() -> None:
    draw = random.Random(1)
    cores = Cores(Router(), {core: RATE / (5 if core == 0 else 1) for core in range(4)})
    now = 0.0
    for _ in range(600):
        now += draw.expovariate(2.0 * RATE / 2000)
        cores.request(fresh_keys(draw, 2000), 2000, now)
    others = (cores.computed.total() - cores.computed[0]) / 3
    assert cores.computed[0] < 0.5 * others


def test_a_hung_core_gets_no_more_than_its_queue_is_worth() -> None:
    draw = random.Random(2)
    cores = Cores(Router(), {core: 1e-3 if core == 0 else RATE for core in range(4)})
    now = 0.0
    for _ in range(400):
        now += draw.expovariate(1.5 * RATE / 2000)
        cores.request(fresh_keys(draw, 2000), 2000, now)
    assert cores.computed[0] / 2000 < 12


def test_a_report_of_impossible_load_is_no_load() -> None:
    router = Router()
    for core in range(2):
        router.add(core)
    router.on_load(0, OthersLoad(-(10**12), -5))
    router.on_sent(0, 0, [], 5000, 0.0)
    assert {router.pick([], 1000, 0.0) for _ in range(20)} == {1}


@pytest.mark.parametrize("num_cores", [8, 1000])
def test_a_choice_looks_at_twelve_cores_of_any_number(num_cores: int) -> None:
    draw, router = random.Random(0), Router()
    for core in range(num_cores):
        router.add(core)
    chains = [fresh_keys(draw, 100 * KEY) for _ in range(20)]
    for request_id in range(500):
        keys = draw.choice(chains)
        router.on_sent(request_id, draw.randrange(num_cores), keys, 100 * KEY, 0.0)
    loads = router.loads = CountingLoads(router.loads)
    for keys in chains:
        before = loads.num_reads
        assert router.pick(keys, 100 * KEY, 1.0) is not None
        assert loads.num_reads - before <= NUM_CANDIDATES


def test_memory_is_bounded_by_open_answers_and_the_index() -> None:
    draw, router = random.Random(0), Router(max_entries=1000)
    router.add(0)
    for request_id in range(500):
        router.on_sent(request_id, 0, fresh_keys(draw, 30 * KEY), 30 * KEY, 0.0)
        router.on_first_token(request_id, 0.5)
        router.on_finished(request_id, 10, 1.0)
        router.lose(0)
        router.add(0)
    assert (len(router.open), len(router.loads)) == (0, 1) and router.index.num_entries <= 1000


# ── the pace of resumed requests ─────────────────────────────────────────────────────────────────────────────────────

MOST = FACTOR * FIRST_RATE * WINDOW_S  # tokens, before any rate is measured


def new_pacer(num_cores: int) -> tuple[Router, ResumePacer]:
    router = Router()
    for core in range(num_cores):
        router.add(core)
    return router, ResumePacer(router)


@pytest.mark.parametrize("seed", seeds(4, 10))
def test_a_core_gets_at_most_its_limit_and_one_request_in_any_second_and_waits_no_longer(seed: int) -> None:
    draw, now, sent = random.Random(seed), 0.0, list[tuple[float, int, int]]()
    router, pacer = new_pacer(num_cores := draw.choice([1, 3]))

    def recent(core: int, at: float) -> int:
        return sum(tokens for when, to, tokens in sent if to == core and when + WINDOW_S > at)

    for _ in range(200):
        num_tokens, begun_at = draw.randint(1, 15_000), now
        while (core := pacer.pick([], num_tokens, num_tokens, now)) is None:
            now = pacer.end()
            assert begun_at < now <= begun_at + WINDOW_S, "each core gets one a second"
        assert pacer.end() == float("inf") or recent(core, now) < MOST
        assert recent(core, now) < MOST
        if now > begun_at:  # a moment before it would have been too much, anywhere
            assert all(recent(each, now - 1e-6) >= MOST for each in range(num_cores))
        assert sorted(router.cores) == list(range(num_cores))
        sent.append((now, core, num_tokens))
        now += draw.choice([0.0, 0.0, draw.uniform(0, 2)])


def test_a_core_that_has_got_enough_is_passed_over_and_a_successor_starts_anew() -> None:
    _, pacer = new_pacer(2)
    assert {pacer.pick([], 1, int(MOST), 5.0) for _ in range(2)} == {0, 1}
    assert pacer.pick([], 1, 1, 5.0) is None and pacer.end() == 5.0 + WINDOW_S
    pacer.forget(1)
    assert pacer.pick([], 1, 1, 5.0) == 1


def test_requests_that_name_a_conversation_go_to_one_core_in_each_frontend_unless_it_costs_much_more() -> None:
    one, other = Router(seed=1), Router(seed=2)
    for router in (one, other):
        for core in range(4):
            router.add(core)
    favorites = {name: one.favorite(name) for name in map(str, range(200))}
    assert favorites == {name: other.favorite(name) for name in favorites}
    assert all(count >= 25 for count in Counter(favorites.values()).values())
    for favorite in favorites.values():
        assert one.pick([], 1000, 0.0, favorite=favorite) == favorite == other.pick([], 1000, 0.0, favorite=favorite)
    lost = favorites["0"]
    assert lost is not None
    one.lose(lost)
    moved = {name for name in favorites if one.favorite(name) != favorites[name]}
    assert moved == {name for name, favorite in favorites.items() if favorite == lost}, "others keep their core"
    busy = favorites["1"] if favorites["1"] != lost else next(each for each in favorites.values() if each != lost)
    assert busy is not None
    for request_id in range(50):
        one.on_sent(request_id, busy, [], 5000, 0.0)
    assert one.pick([], 100, 0.0, favorite=busy) != busy
