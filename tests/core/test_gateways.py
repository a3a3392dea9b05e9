"""A core admits gateways of an equal model beside its own frontend, and each loses the other after a lease."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tokenloom.core.links import frontend_port as module
from tokenloom.core.links.frontend_port import FrontendPort
from tokenloom.ipc.codec import Decoder, encode
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.base import PROTOCOL_VERSION, Ping, Pong, Refused, Unknown
from tokenloom.ipc.messages.core import CoreToFrontend, FrontendToCore, GatewayHello, GatewayWelcome, ModelDigest
from tokenloom.ipc.messages.orders import Order, Ordered
from tokenloom.ipc.messages.supervisor import ReplicaDown
from tokenloom.ipc.notes.touched import TouchedAnswers
from tokenloom.ipc.sockets.client_auth import CORES, ZapHandler
from tokenloom.ipc.sockets.endpoints import Endpoints
from tokenloom.ipc.sockets.keys import Keys
from tokenloom.ipc.sockets.zmq_sockets import new_socket
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.support.engine_specs import new_spec

DEADLINE_S = 10.0
MODEL = ModelDigest(
    weights="w", model="m", tokenizer="t", dtype="float32", kv_cache_dtype="auto", block_size=16, max_model_len=512
)
HELLO = GatewayHello(protocol_version=PROTOCOL_VERSION, model=MODEL)


class Engine:
    """Stands in for the EngineCore: notes which frontends are dropped."""

    def __init__(self) -> None:
        self.dropped: list[int] = []

    def drop_frontend(self, frontend_id: int) -> int:
        self.dropped.append(frontend_id)
        return 0


class Rig:
    """A FrontendPort with a gateway's socket connected to it by tcp."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        Keys.generate().save(folder / "key")
        self.keys = Keys.load(folder / "key")
        with zmq.Context() as probe, probe.socket(zmq.ROUTER) as taken:
            port = taken.bind_to_random_port("tcp://127.0.0.1")
        config = EngineConfig(core_listen=f"tcp://127.0.0.1:{port}", hosts_key_file=str(folder / "key"))
        spec = new_spec(run_directory=str(folder), config=config, endpoints=Endpoints.in_folder(folder), digest=MODEL)
        self.zap = ZapHandler(self.context, self.keys.client_public, CORES)
        self.orders: list[Order] = []
        touched = TouchedAnswers(folder / "touched")
        self.port, self.engine = FrontendPort(self.context, spec, touched, self.orders.append), Engine()
        self.port.pool = PoolShape(9, 1, (1,))
        self.gateway = new_socket(self.context, zmq.DEALER, identity=b"run/frontend-0")
        self.keys.secure_client(self.gateway)
        self.gateway.connect(f"tcp://127.0.0.1:{port}")
        self._decoder: Decoder[CoreToFrontend] = Decoder(CoreToFrontend)

    def ask(self, message: FrontendToCore) -> CoreToFrontend:
        """Send a message and return the next one of the core."""
        self.gateway.send(encode(message))
        return self.next()

    def next(self) -> CoreToFrontend:
        deadline = time.monotonic() + DEADLINE_S
        while not self.gateway.poll(5):
            assert time.monotonic() < deadline
            self.zap.answer()
            self.port.receive(self.engine)  # type: ignore[arg-type]
        return self._decoder.decode(self.gateway.recv())


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.context.destroy(linger=0)


def test_a_gateway_of_an_equal_model_is_welcome_and_another_is_told_what_differs(rig: Rig) -> None:
    assert rig.ask(Ping()) == Unknown()
    other = msgspec.structs.replace(MODEL, dtype="bfloat16")
    refused = rig.ask(GatewayHello(protocol_version=PROTOCOL_VERSION, model=other))
    assert isinstance(refused, Refused)
    assert refused.error.message == (
        "the engine serves another model than the gateway: its dtype is float32, not bfloat16"
    )
    assert isinstance(rig.ask(GatewayHello(protocol_version=PROTOCOL_VERSION + 1, model=MODEL)), Refused)
    without_weights = msgspec.structs.replace(MODEL, weights="")
    welcome = rig.ask(GatewayHello(protocol_version=PROTOCOL_VERSION, model=without_weights))
    assert welcome == GatewayWelcome(model=MODEL, num_blocks=9, max_model_len=MODEL.max_model_len)
    assert rig.ask(Ping()) == Pong()


def test_a_silent_gateway_is_lost_after_its_lease_and_must_say_hello_again(rig: Rig) -> None:
    rig.ask(HELLO)
    now = time.monotonic()
    for beat in range(3):
        rig.port.judge(rig.engine, now + beat)  # type: ignore[arg-type]
    assert rig.engine.dropped == [] and rig.port.next_at == now + 3
    rig.port.judge(rig.engine, now + module.LEASE_S + 0.4)  # type: ignore[arg-type]
    assert rig.engine.dropped == [0] and rig.port.next_at is None
    assert rig.ask(Ping()) == Unknown()
    assert isinstance(rig.ask(HELLO), GatewayWelcome)


def test_a_core_that_was_stopped_judges_nobody_and_none_while_messages_wait(rig: Rig) -> None:
    rig.ask(HELLO)
    now = time.monotonic()
    rig.port.judge(rig.engine, now + 100)  # type: ignore[arg-type]
    assert rig.engine.dropped == []
    rig.gateway.send(encode(Ping()))
    assert rig.port.wakers[0].poll(int(DEADLINE_S * 1000))
    for beat in range(1, 5):
        rig.port.judge(rig.engine, now + 100 + beat)  # type: ignore[arg-type]
    assert rig.engine.dropped == [], "its ping waits to be read"


def test_gateways_hear_what_supervisors_tell_frontends(rig: Rig) -> None:
    down = ReplicaDown(replica=0, reason="why", has_core=True)
    rig.port.tell_gateways(down)
    rig.ask(HELLO)
    rig.port.tell_gateways(down)
    assert rig.next() == down


def test_an_order_of_a_gateway_goes_to_the_supervisor_for_this_replica_and_its_reply_to_the_gateway(rig: Rig) -> None:
    rig.ask(HELLO)
    rig.gateway.send(encode(Order(order_id="1/0", action="sleep")))
    assert rig.ask(Ping()) == Pong() and rig.orders == [Order(order_id="1/0", action="sleep", replica=0)]
    for order_id in ("2/0", "1/0"):
        rig.port.on_ordered(Ordered(order_id=order_id))
    assert rig.next() == Ordered(order_id="1/0")
