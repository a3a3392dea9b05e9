"""A gateway's connections: cores come and go, silent ones are lost, and their totals never fall."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tokenloom.frontend.server.cores.blob_sender import BlobSender
from tokenloom.frontend.server.cores.remote_cores import RemoteCores
from tokenloom.ipc.blobs.store import BlobStore
from tokenloom.ipc.codec import Decoder, encode
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.base import LEASE_S, Ping, Refused, Welcome
from tokenloom.ipc.messages.blobs import BlobChunk, BlobReply, GetBlob, NoBlob
from tokenloom.ipc.messages.core import (
    CoreToFrontend,
    FrontendToCore,
    GatewayHello,
    GatewayWelcome,
    ModelDigest,
    WeightsChanged,
)
from tokenloom.ipc.messages.orders import Order, Ordered
from tokenloom.ipc.messages.supervisor import CoreUp, Initialize, Progress, ReplicaDown, WorkersUp
from tokenloom.ipc.sockets.client_auth import CORES, ZapHandler
from tokenloom.ipc.sockets.keys import Keys
from tokenloom.ipc.sockets.zmq_sockets import new_socket
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.tests.support.engine_specs import in_folder, new_spec
from tokenloom.tests.support.shortages import few_descriptors, few_threads
from tokenloom.tests.support.waiting import wait_until

MODEL = ModelDigest(
    weights="", model="m", tokenizer="t", dtype="float32", kv_cache_dtype="auto", block_size=16, max_model_len=512
)


class FakeCore:
    """The core of an engine, as far as a gateway sees it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys, address: str) -> None:
        self._context, self._keys, self.address = context, keys, address
        self.received: list[FrontendToCore] = []
        self._identity = b""
        self._decoder: Decoder[FrontendToCore] = Decoder(FrontendToCore)
        self.start()

    def start(self) -> None:
        self.socket = new_socket(self._context, zmq.ROUTER)
        self.address = self._keys.listen(self.socket, CORES, self.address)

    def stop(self) -> None:
        self.socket.close(linger=0)

    def turn(self) -> None:
        while not self.socket.closed and self.socket.poll(0):
            self._identity, frame = self.socket.recv_multipart()
            self.received.append(self._decoder.decode(frame))

    def send(self, message: CoreToFrontend) -> None:
        self.socket.send_multipart([self._identity, encode(message)])


class Rig:
    """Two cores, and the connections of a gateway's frontend to them."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        Keys.generate().save(folder / "key")
        keys = Keys.load(folder / "key")
        self._zap = ZapHandler(self.context, keys.client_public, CORES)
        self.cores = [FakeCore(self.context, keys, "tcp://127.0.0.1:*") for _ in range(2)]
        config = EngineConfig(cores=",".join(core.address for core in self.cores), hosts_key_file=str(folder / "key"))
        self.spec: EngineSpec = new_spec(run_directory=str(folder), config=config, digest=MODEL)
        self.replies: list[Ordered] = []
        self.links = RemoteCores(self.context, self.spec, b"frontend-0", Counter(), lambda: None, self.replies.append)
        self.news: list[tuple[int, object]] = []
        self.now = time.monotonic()  # of the links

    def until(self, condition: Callable[[], object], turn_s: float = 0.0) -> None:
        """Turn until a condition holds; a turn takes `turn_s` by the clock of the links."""

        def is_done() -> object:
            self.now += turn_s
            self._zap.answer()
            for core in self.cores:
                core.turn()
            self.news += self.links.receive(self.now)
            return condition()

        wait_until(is_done)

    def greet(self, number: int, weights: str = "w", num_blocks: int = 9) -> None:
        """Let a core welcome the gateway, as a Frontend that says Hello to it would see it."""
        self.until(lambda: self.has(number, CoreUp))
        self.links.send([[self.spec.hello_to_core] if each == number else [] for each in range(2)])
        core = self.cores[number]
        self.until(lambda: any(isinstance(each, GatewayHello) for each in core.received))
        core.send(
            GatewayWelcome(
                model=msgspec.structs.replace(MODEL, weights=weights),
                num_blocks=num_blocks,
                max_model_len=16 * num_blocks,
            )
        )

    def join(self, *numbers: int, **welcome: Any) -> None:
        """Greet cores, and wait until the gateway uses them."""
        for number in numbers:
            self.greet(number, **welcome)
            self.until(lambda number=number: self.has(number, Welcome))

    def has(self, number: int, kind: type) -> bool:
        return any(of == number and isinstance(each, kind) for of, each in self.news)

    def last(self, kind: type) -> object:
        return [each for _, each in self.news if isinstance(each, kind)][-1]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.links.close()
    rig.context.destroy(linger=0)


def test_cores_join_and_their_pools_and_totals_add_up(rig: Rig) -> None:
    rig.join(0)
    rig.join(1, num_blocks=5)
    assert rig.last(Initialize) == Initialize(pool=PoolShape(5, 1, (1,)), num_all_blocks=12, max_model_len=80)
    rig.links.complete(Progress(step=0, step_age_s=0, num_running=0, num_waiting=0, num_restarts=2, frontends=["f"]))
    for core, step in zip(rig.cores, (3, 4), strict=True):
        core.send(Progress(step=step, step_age_s=0.0, num_running=1, num_waiting=0))
    rig.until(lambda: rig.has(0, Progress) and getattr(rig.last(Progress), "step", 0) == 7)
    found = rig.last(Progress)
    assert isinstance(found, Progress)
    assert (found.num_running, found.num_restarts, found.frontends, found.is_core_up) == (2, 2, ["f"], True)
    rig.cores[1].send(ReplicaDown(replica=0, reason="its workers", has_core=True))
    rig.cores[1].send(WorkersUp(generation=1))
    rig.until(lambda: rig.has(1, WorkersUp))
    assert (rig.last(ReplicaDown), rig.last(WorkersUp)) == (
        ReplicaDown(replica=1, reason="its workers", has_core=True),
        WorkersUp(generation=1, replica=1),
    )


def test_a_core_that_ends_is_lost_at_once_and_comes_back_with_its_totals(rig: Rig) -> None:
    rig.join(0)
    rig.cores[0].send(Progress(step=8, step_age_s=0.0, num_running=3, num_waiting=0))
    rig.until(lambda: getattr(rig.last(Progress), "step", 0) == 8)
    rig.cores[0].stop()
    rig.until(lambda: rig.has(0, ReplicaDown))  # the time of the links stands still
    found = rig.last(Progress)
    assert isinstance(found, Progress)
    assert (found.step, found.num_running, found.is_core_up) == (8, 0, False)
    rig.news.clear()
    rig.cores[0].received.clear()
    rig.cores[0].start()
    rig.join(0)
    rig.cores[0].send(Progress(step=2, step_age_s=0.0, num_running=1, num_waiting=0))
    rig.until(lambda: getattr(rig.last(Progress), "step", 0) == 10)


def test_a_silent_core_is_lost_after_its_lease_but_not_by_a_loop_that_was_stopped(rig: Rig) -> None:
    assert not rig.links.may_begin(rig.now) and rig.links.may_begin(rig.now + 3.1), "without a core after a while"
    rig.join(0)
    rig.until(lambda: any(isinstance(each, Ping) for each in rig.cores[0].received), turn_s=0.1)
    rig.now += 100
    rig.news += rig.links.receive(rig.now)
    assert not rig.has(0, ReplicaDown), "the loop itself stood still"
    begun = rig.now
    rig.until(lambda: rig.has(0, ReplicaDown), turn_s=0.5)
    assert LEASE_S < rig.now - begun <= LEASE_S + 0.5
    assert "silent for 3 s" in str(rig.last(ReplicaDown))


def test_cores_of_other_weights_and_refusals_are_one_line_each(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="tokenloom"):
        rig.join(0, weights="one")
        rig.greet(1, weights="other")
        rig.until(lambda: caplog.records)
        assert not rig.has(1, Welcome)
        assert "another model than the gateway: its weights is other, not one" in caplog.text
        for _ in range(2):
            rig.cores[1].received.clear()
            rig.links.send([[], [rig.spec.hello_to_core]])
            rig.until(lambda: rig.cores[1].received)
            rig.cores[1].send(Refused(error=ErrorInfo("protocol", "no")))
        rig.until(lambda: len(caplog.records) > 1)
        assert [record.getMessage().partition("used: ")[2] for record in caplog.records[1:]] == ["no"]


def test_parts_of_blobs_go_to_the_core_that_asks(rig: Rig, tmp_path: Path) -> None:
    digest = BlobStore(tmp_path / "media", 1 << 20).put(b"an image")
    rig.join(0, 1)
    rig.cores[1].send(GetBlob(digest=digest, offset=3, length=100))
    rig.cores[0].send(GetBlob(digest=bytes(32), offset=0, length=1))

    def replies(number: int) -> list[object]:
        rig.links.send([[], []])
        return [each for each in rig.cores[number].received if isinstance(each, (BlobChunk, NoBlob))]

    rig.until(lambda: replies(0) and replies(1))
    assert replies(0) == [NoBlob(digest=bytes(32))]
    assert replies(1) == [BlobChunk(digest=digest, offset=3, size=8, data=b"image")]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("w2", ""),
        ("w3", "the engine serves another model than the gateway: its weights is w3, not w2"),
        ("", "it cannot read the weights of the others: /two cannot be read"),
    ],
)
def test_a_core_that_was_away_during_a_reload_reads_the_new_weights_before_it_is_used(
    rig: Rig, weights: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig.join(0)
    rig.cores[0].send(WeightsChanged(weights="w2", model_folder="/two"))
    rig.cores[0].send(Progress(step=77, step_age_s=0.0, num_running=0, num_waiting=0))
    rig.until(lambda: getattr(rig.last(Progress), "step", 0) == 77)
    rig.greet(1)
    core = rig.cores[1]
    rig.until(lambda: any(isinstance(each, Order) for each in core.received))
    (order,) = (each for each in core.received if isinstance(each, Order))
    assert (order.action, order.model) == ("reload", "/two") and not rig.has(1, Welcome)
    if weights:
        core.send(WeightsChanged(weights=weights, model_folder="/two"))
    error = None if weights else ErrorInfo("request", "/two cannot be read")
    core.send(Ordered(order_id=order.order_id, error=error))
    rig.until(lambda: message in caplog.text if message else rig.has(1, Welcome))
    assert rig.has(1, Welcome) == (not message)


def test_an_order_goes_to_all_cores_and_its_reply_comes_after_theirs(rig: Rig) -> None:
    assert not rig.links.take_order(Order(order_id="1", action="log_level")), "it is for the gateway's own processes"
    rig.join(0, 1)
    assert rig.links.take_order(Order(order_id="1", action="sleep"))
    for number, core in enumerate(rig.cores):
        rig.until(lambda core=core: any(isinstance(each, Order) for each in core.received))
        assert rig.replies == []
        core.send(Ordered(order_id=f"1/{number}"))
    rig.until(lambda: rig.replies)
    assert rig.replies == [Ordered(order_id="1")]


# ── the reader of blobs ──────────────────────────────────────────────────────────────────────────────────────────────

DEADLINE_S = 20.0


def test_a_part_is_read_again_after_threads_and_descriptors_had_run_out(tmp_path: Path) -> None:
    spec = in_folder(new_spec(), tmp_path)
    digest = BlobStore(Path(spec.run_directory, "media"), spec.config.media_store_bytes).put(b"abc")
    request, woken = GetBlob(digest=digest, offset=0, length=3), threading.Event()
    sender = BlobSender(spec, woken.set)
    with few_threads():
        sender.ask(1, request)
    replies = replies_to(sender, woken, GetBlob(digest=bytes(32), offset=0, length=3), 2)
    assert [core for core, _ in replies] == [2], "the first part was not read later"
    with few_descriptors():
        sender.ask(3, request)
        while sender._requests.qsize():
            pass
    ((core, reply),) = replies_to(sender, woken, request, 4)
    assert core == 4 and isinstance(reply, BlobChunk) and reply.data == b"abc"


def replies_to(sender: BlobSender, woken: threading.Event, request: GetBlob, core: int) -> list[tuple[int, BlobReply]]:
    woken.clear()
    sender.ask(core, request)
    assert woken.wait(DEADLINE_S)
    return sender.take()
