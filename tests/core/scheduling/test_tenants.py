"""API keys share tokens, rows, blocks and the queue by their weights; one key is as none."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import msgspec
import pytest

from tokenloom.core.scheduling.tenants import MAX_KEPT
from tokenloom.core.tenant import Tenant
from tokenloom.ipc.codec import decode_ids
from tokenloom.ipc.messages.core import TenantRef
from tokenloom.tests.core.fake_worker import FakeWorker
from tokenloom.tests.core.harness import Harness, prompt_of
from tokenloom.tests.support.today import seeds

STEP_S, TOKEN_S = 0.012, 0.0006  # of a model with 135M parameters: of a step, and of each token in it
CALM = [TenantRef(name=f"calm-{number}") for number in range(7)]
FLOOD = TenantRef(name="flood")
PROMPT, ANSWER = 128, 64


class QuickWorker(FakeWorker):
    """A worker that checks nothing."""

    def _write(self, row_id: int, count: int) -> None:
        pass

    def _read(self, row_id: int, count: int, masks: list[list[int]] | None) -> list[int] | None:
        row = self.rows[row_id]
        row.num_computed += count
        if row.num_computed < len(row.tokens):
            return None
        row.tokens.append(1)
        return [1]


class QuickHarness(Harness):
    new_worker = QuickWorker


class Simulation:
    """Seven calm keys with three callers each, which ask again a while after each answer, in simulated time, beside
    `num_open` requests of another key, each of which another one follows."""

    def __init__(self, seed: int, num_open: int, pause_s: float) -> None:
        self._draw, self._pause_s = random.Random(seed), pause_s
        self.harness = QuickHarness(4000, max_num_seqs=24, max_num_batched_tokens=1024, max_waiting_requests=2000)
        self.harness.worker.step_s, self.harness.worker.token_s = STEP_S, TOKEN_S
        self.now = 100.0
        self.harness.core.scheduler.tenants._clock = lambda: self.now
        self._keys = itertools.count(1)
        self._add(FLOOD)  # the cost of prompts is known
        self.harness.run()
        self._flood = {self._add(FLOOD) for _ in range(num_open)}
        self._next = [(self.now + self._wait_s(), tie, ref) for tie, ref in enumerate(3 * CALM)]
        self._open: dict[int, tuple[float, int, TenantRef]] = {}
        self._waits: dict[int, float] = {}  # for the first token since then, by request
        self.served: Counter[str] = Counter()
        self.first_s: list[float] = []

    def _wait_s(self) -> float:
        return self._draw.expovariate(1 / self._pause_s)

    def _add(self, tenant: TenantRef) -> int:
        key = next(self._keys)
        prompt = self._draw.choices(range(1, 990), k=self._draw.randrange(PROMPT // 2, PROMPT))
        self.harness.add(key, prompt, self._draw.randrange(ANSWER // 2, ANSWER), tenant=tenant, arrival_time=self.now)
        return key

    def run(self, seconds: float) -> None:
        ends_at, end = float("inf"), self.now + seconds
        while self.now < end:
            self.harness.core.step()
            if ends_at == float("inf") and self.harness.worker.queue:
                ends_at = self.now + STEP_S + TOKEN_S * sum(decode_ids(self.harness.worker.queue[0].counts))
            if self._next and min(self._next)[0] < ends_at:
                self.now, tie, tenant = min(self._next)
                self._next.remove((self.now, tie, tenant))
                key = self._add(tenant)
                self._open[key], self._waits[key] = (self.now, tie, tenant), self.now
                continue
            self.now, ends_at = ends_at, float("inf")
            self._answer()

    def _answer(self) -> None:
        harness = self.harness
        rows, batch = harness.core.scheduler.rows, harness.core.scheduler.ledger.entries[0].batch
        for row, count in zip(batch.rows.tolist(), batch.counts.tolist(), strict=True):
            if (request := rows.request_by_row[row]) is not None:
                self.served[request.tenant.name] += count
        harness.answer()
        for key in [key for key in self._waits if harness.tokens[key]]:
            self.first_s.append(self.now - self._waits.pop(key))
        for key in [key for key in self._open if key in harness.finished]:
            _, tie, tenant = self._open.pop(key)
            self._next.append((self.now + self._wait_s(), tie, tenant))
        ended = {key for key in self._flood if key in harness.finished}
        self._flood = self._flood - ended | {self._add(FLOOD) for _ in ended}


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def jain(values: list[int]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def test_a_flood_of_one_key_neither_takes_the_tokens_of_calm_ones_nor_delays_them() -> None:
    alone, beside = Simulation(0, 0, 0.1), Simulation(0, 400, 0.1)
    for simulation in (alone, beside):
        simulation.run(4.0)
        simulation.served.clear()
        simulation.first_s.clear()
        simulation.run(20.0)
    assert jain([*beside.served.values()]) >= 0.95
    assert p99(beside.first_s) <= 1.5 * p99(alone.first_s)


@pytest.mark.parametrize("seed", seeds(3, 20))
def test_requests_of_one_key_run_in_the_steps_of_requests_without_one(seed: int) -> None:
    """The order of rows, and each message of a step, are the same."""
    messages = []
    for tenant in (None, TenantRef(name="only", weight=0.3)):
        rng = random.Random(seed)
        harness = QuickHarness(
            rng.choice([30, 200]), max_num_seqs=4, scheduling_policy=rng.choice(["fcfs", "priority"])
        )
        sent: list[bytes] = []
        for key in range(40):
            more = {"priority": rng.randrange(3), "service_tier": rng.choice(["default", "flex"])}
            harness.add(key, prompt_of(rng, rng.randrange(1, 60)), rng.randrange(1, 20), tenant=tenant, **more)
            for _ in range(rng.randrange(4)):
                harness.core.step()
                sent += [msgspec.msgpack.encode(output) for output in harness.worker.queue]
                harness.answer()
        messages.append(sent)
    assert messages[0] == messages[1] and len(messages[0]) > 40


@pytest.mark.parametrize("seed", seeds(3, 20))
def test_keys_that_always_ask_get_tokens_by_their_weights(seed: int) -> None:
    rng = random.Random(seed)
    weights = {f"key-{number}": rng.choice([0.5, 1.0, 2.0, 4.0]) for number in range(rng.randrange(2, 5))}
    harness = QuickHarness(2000, max_num_seqs=16, max_waiting_requests=10_000, steps_in_flight=1)
    scheduler, keys, served = harness.core.scheduler, itertools.count(), Counter[str]()
    for _ in range(800):
        for name, weight in weights.items():
            while scheduler.tenants.of(ref := TenantRef(name=name, weight=weight)).num_waiting < 4:
                harness.add(next(keys), prompt_of(rng, rng.randrange(1, 40)), rng.randrange(1, 30), tenant=ref)
        harness.core.step()
        batch = scheduler.ledger.entries[0].batch
        for row, count in zip(batch.rows.tolist(), batch.counts.tolist(), strict=True):
            served[scheduler.rows.request(row).tenant.name] += count
        harness.answer()
    scheduler.check_invariants()
    shares = [served[name] / weight for name, weight in weights.items()]
    assert max(shares) <= 1.1 * min(shares), served


@pytest.mark.parametrize("seed", seeds(5, 50))
def test_of_the_first_level_the_key_that_was_served_least_comes_first(seed: int) -> None:
    rng = random.Random(seed)
    harness = QuickHarness(2000, max_num_seqs=16, max_waiting_requests=10_000, scheduling_policy="priority")
    scheduler, waiting = harness.core.scheduler, harness.core.scheduler.waiting
    refs = [None, *(TenantRef(name=str(number)) for number in range(3))]
    for key in range(60):
        more = {"priority": rng.randrange(3), "service_tier": rng.choice(["default", "flex"])}
        harness.add(key, [1] * rng.randrange(1, 9), tenant=rng.choice(refs), arrival_time=rng.uniform(0, 200), **more)
    while len(waiting):
        scheduler.tenants._served[:] = [rng.randrange(3) for _ in scheduler.tenants._served]
        first = {}
        for request in sorted(waiting, key=lambda each: each.sort_key):
            first.setdefault(request.tenant, request)
        level = min(first.values(), key=lambda each: each.sort_key).level
        served = scheduler.tenants.served
        expected = min(
            (each for each in first.values() if each.level == level),
            key=lambda each: (served(each.tenant), each.sort_key),
        )
        assert waiting.pop() is expected


def test_a_full_queue_of_one_key_refuses_no_other_and_running_ones_give_way() -> None:
    harness = QuickHarness(400, max_num_seqs=4, max_waiting_requests=20)
    for key in range(30):
        harness.add(key, [key + 1] * 8, 60, tenant=FLOOD)
        harness.turn()
    refused = [key for key, end in harness.finished.items() if end.reason == "error"]
    assert refused and harness.core.scheduler.rows.num_active == 4
    for key, calm in enumerate(CALM[:2], 100):
        harness.add(key, [key] * 8, 5, tenant=calm)
    assert not {100, 101} & set(harness.finished), "their keys have room in the queue"
    harness.turns(3)
    names = Counter(request.tenant.name for request in harness.core.scheduler.rows.requests())
    assert names == {"flood": 2, "calm-0": 1, "calm-1": 1}
    harness.run()
    assert {end.reason for key, end in harness.finished.items() if key not in refused} == {"length"}


def test_keys_without_requests_are_forgotten() -> None:
    harness = QuickHarness(400, max_num_seqs=4)
    for key in range(4 * MAX_KEPT):
        harness.add(key, [1] * 8, 2, tenant=TenantRef(name=str(key)))
        harness.run()
    assert len(harness.core.scheduler.tenants._by_name) <= MAX_KEPT + 2
    harness.core.scheduler.check_invariants()


@pytest.mark.parametrize("seed", seeds(4, 40))
def test_a_key_waits_at_its_share_of_the_pool_while_others_ask_and_never_for_ever(seed: int) -> None:
    rng = random.Random(seed)
    refs = [None, *(TenantRef(name=name, kv_share=rng.choice([0.05, 0.2, 0.5])) for name in "ab")]
    harness = QuickHarness(101, max_num_seqs=16, max_waiting_requests=1000)
    rows, tenants = harness.core.scheduler.rows, harness.core.scheduler.tenants
    for key in range(120):
        harness.add(key, prompt_of(rng, rng.randrange(1, 60)), rng.randrange(1, 20), tenant=rng.choice(refs))
    num_full = 0
    while harness.core.num_requests:
        before = {request: request.tenant for request in rows.requests()}
        held = Counter[Tenant]()
        for request in before:
            held[request.tenant] += request.num_blocks
        are_several = tenants.are_several
        harness.core.step()
        for request in rows.requests():
            share = request.tenant.kv_share
            if request not in before and are_several and request.tenant in before.values() and share < 1:
                assert held[request.tenant] < share * 100, "it was full"
        num_full += any(tenants.is_full(tenant) for tenant in held)
        harness.answer()
        harness.core.scheduler.check_invariants()
    assert num_full and len(harness.finished) == 120
