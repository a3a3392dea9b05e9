"""Whatever order requests, replies and losses come in: a request runs when all of its blobs are here, which stay until
it ends, and no other blob does."""

from __future__ import annotations

import random
from typing import cast

import pytest

from tokenloom.core.features.blobs.needed_blobs import Failed, Found, Missing, NeededBlobs, Wanted
from tokenloom.core.request import Request, State, WaitReason
from tokenloom.core.scheduling.prefill_throttle import PrefillThrottle
from tokenloom.core.scheduling.step.rows import Rows
from tokenloom.core.scheduling.tenants import Tenants
from tokenloom.core.scheduling.waiting_queue import WaitingQueue
from tokenloom.ipc.errors import ErrorInfo, Overloaded
from tokenloom.ipc.messages.adapter import AdapterRef
from tokenloom.ipc.messages.base import FinishReason
from tokenloom.ipc.messages.media import MediaSpan
from tokenloom.tests.core.harness import make_request
from tokenloom.tests.support.today import some

LOCAL, *GATEWAYS = range(4)
DIGESTS = [bytes([number]) * 32 for number in range(8)]


class Bench:
    """The table with a fetcher that notes its orders."""

    def __init__(self, max_blobs: int = 100) -> None:
        self.needed = NeededBlobs(self, max_blobs)
        self.waiting = WaitingQueue(Tenants(cast(Rows, None), cast(PrefillThrottle, None), 1))  # of one tenant
        self.needed.connect(self.waiting, self)
        for frontend_id in GATEWAYS:
            self.needed.add_frontend(frontend_id)
        self.wanted: dict[Wanted, int] = {}  # with the frontend that is asked, those that have not ended
        self.here: set[Wanted] = set()
        self.open: set[Request] = set()
        self.errors: list[ErrorInfo] = []
        self.num_asked = 0

    def want(self, wanted: Wanted, frontend_id: int) -> None:
        self.wanted[wanted] = frontend_id
        self.num_asked += 1

    def drop(self, wanted: Wanted) -> None:
        assert self.wanted.pop(wanted, None) is not None or wanted in self.here, "it is dropped twice"
        self.here.discard(wanted)

    def add(self, key: int, frontend_id: int, adapter: bytes | None = None, media: tuple[bytes, ...] = ()) -> Request:
        spans = [MediaSpan(digest=each, start=0, length=1, num_embeds=1, grid=(1, 1, 1)) for each in media]
        ref = None if adapter is None else AdapterRef(digest=adapter, folder="", rank=1)
        request = make_request(key, frontend_id=frontend_id, adapter=ref, media=spans)
        self.open.add(request)
        self.needed.arrive(request)
        self.waiting.add(request)
        return request

    def end(self, request: Request, reason: FinishReason = "stop", error: ErrorInfo | None = None) -> None:
        if error is not None:
            self.errors.append(error)
        request.move(State.FINISHED)
        self.waiting.forget(request)
        self.open.discard(request)
        self.needed.end(request, reason)

    def find(self, wanted: Wanted) -> None:
        del self.wanted[wanted]
        self.here.add(wanted)
        self.needed.on_news(Found(wanted))

    def check(self) -> None:
        self.needed.check_invariants([*self.open])
        here = {wanted.digest for wanted in self.here}
        assert len(here) == len(self.here) and here.isdisjoint(wanted.digest for wanted in self.wanted)
        for request in self.open:
            names = {span.digest for span in request.media} | (
                {request.adapter.digest} if request.adapter is not None else set()
            )
            is_local = request.frontend_id == LOCAL
            assert WaitReason.BLOB in request.waits_for or is_local or names <= here


@pytest.mark.parametrize("seed", some(range(30), 6))
def test_requests_run_with_all_their_blobs_and_nothing_else_is_kept(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(max_blobs=rng.choice([2, 4, 100]))
    stale: list[Wanted] = []
    for key in range(200):
        choice = rng.random()
        if choice < 0.35:
            adapter, media = rng.choice([None, *DIGESTS[:3]]), rng.choices(DIGESTS[3:], k=rng.randrange(4))
            bench.add(key, rng.choice([LOCAL, *GATEWAYS]), adapter, tuple(media))
        elif choice < 0.6 and bench.open:
            bench.end(rng.choice(sorted(bench.open, key=lambda each: each.key)))
        elif choice < 0.9 and bench.wanted:
            wanted = rng.choice(list(bench.wanted))
            stale.append(wanted)
            if rng.random() < 0.8:
                bench.find(wanted)
            else:
                bench.needed.on_news(Missing(wanted, bench.wanted[wanted]))
        elif stale:
            wanted = rng.choice(stale)
            if wanted not in bench.wanted and wanted not in bench.here:
                bench.needed.on_news(rng.choice([Found(wanted), Failed(wanted, Overloaded("full"))]))
        bench.check()
    while bench.open:
        for wanted in list(bench.wanted):
            bench.find(wanted)
        bench.check()
        for request in sorted(bench.open, key=lambda each: each.key):
            if not request.waits_for:
                bench.end(request)
        bench.check()
    assert not bench.wanted and not bench.here, "something is kept for nobody"


def test_a_blob_that_one_gateway_does_not_have_comes_from_another_and_else_ends_its_requests_alone() -> None:
    bench = Bench()
    bench.add(1, 1, adapter=DIGESTS[0])
    bench.add(2, 2, adapter=DIGESTS[0])
    other = bench.add(3, 1, media=(DIGESTS[1],))
    wanted = next(iter(bench.wanted))
    bench.needed.on_news(Missing(wanted, 1))
    assert bench.wanted[wanted] == 2 and not bench.errors
    bench.needed.on_news(Missing(wanted, 1))
    assert not bench.errors, "the reply to a request that was sent before"
    bench.needed.on_news(Missing(wanted, 2))
    assert [error.kind for error in bench.errors] == ["request", "request"] and bench.open == {other}
    assert "the adapter 0000000000000000 is no longer in the gateway's store" in bench.errors[0].message


def test_a_blob_comes_from_another_gateway_once_the_request_that_named_it_first_has_ended() -> None:
    bench = Bench()
    first = bench.add(1, 1, media=(DIGESTS[0],))
    bench.add(2, 2, media=(DIGESTS[0],))
    bench.end(first)
    assert list(bench.wanted.values()) == [2]


def test_requests_begin_in_their_order_when_more_blobs_may_be_kept() -> None:
    bench = Bench(max_blobs=2)
    first = bench.add(1, 1, media=(DIGESTS[0], DIGESTS[1]))
    second, third = bench.add(2, 1, media=(DIGESTS[2],)), bench.add(3, 1, media=(DIGESTS[0],))
    assert {wanted.digest for wanted in bench.wanted} == {DIGESTS[0], DIGESTS[1]}
    bench.end(first)
    assert {wanted.digest for wanted in bench.wanted} == {DIGESTS[2], DIGESTS[0]}
    assert {second, third} == bench.open
    bench.end(second)
    bench.end(third)
    bench.add(4, 1, media=tuple(DIGESTS[:5]))
    assert len(bench.wanted) == 5, "one that needs more than may be kept runs alone"
