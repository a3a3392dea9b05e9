"""FrontendPort: the core's socket to the frontends of this engine and of gateways, each of which has a number.

It receives requests, aborts and prefetches, sends outputs, and passes orders of gateways on to the supervisor. It never
waits for a frontend: the requests of a frontend that is gone end, and the frontend submits them again when it is back.
The supervisor reports that a frontend of this engine is gone; a gateway's frontend is gone when its lease has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import zmq

from ...ipc.codec import num_ids
from ...ipc.errors import ConfigError, ProtocolError, error_info
from ...ipc.kv.pool_shape import PoolShape
from ...ipc.messages.base import (
    LEASE_S,
    PING_INTERVAL_S,
    PROTOCOL_VERSION,
    Hello,
    Ping,
    Pong,
    Refused,
    Unknown,
    Welcome,
)
from ...ipc.messages.blobs import BlobChunk, NoBlob
from ...ipc.messages.core import (
    AbortRequests,
    CoreToFrontend,
    EngineCoreRequest,
    FrontendToCore,
    GatewayHello,
    GatewayWelcome,
    Prefetch,
    Prefetched,
    WeightsChanged,
)
from ...ipc.messages.orders import Order, Ordered
from ...ipc.messages.supervisor import Progress, ReplicaDown, WorkersUp
from ...ipc.notes.touched import TouchedAnswers
from ...ipc.process.faults import maybe_fail
from ...ipc.sockets.channel import Channel
from ...ipc.sockets.client_auth import CORES
from ...ipc.sockets.keys import Keys
from ...ipc.sockets.zmq_sockets import new_socket
from ...ipc.spec.config.checkpoint_digest import checkpoint_digest
from ...ipc.spec.config.engine_spec import EngineSpec
from ..engine import EngineCore
from ..features.blobs.gateway_blobs import GatewayBlobs
from ..features.blobs.needed_blobs import NeededBlobs
from ..request import Request
from .frontend_loads import FrontendLoads

logger = logging.getLogger("tokenloom.core")

INTAKE_S = 0.001  # longest time spent receiving between two steps


class FrontendPort:
    """Socket to the frontends, bound when this is made, so that they may connect at any time. A frontend gets a number,
    its `frontend_id`, when it first sends Hello."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        spec: EngineSpec,
        touched: TouchedAnswers,
        relay: Callable[[Order], None],
        model_folder: str = "",
    ) -> None:
        """relay: sends an order to the supervisor. model_folder: folder of the weights in use, "" for those of the
        spec. ConfigError if the address of --core-listen cannot be used."""
        socket = new_socket(context, zmq.ROUTER)
        socket.bind(spec.endpoints.core)
        if spec.core_listen is not None:
            _listen_for_gateways(socket, spec, spec.core_listen)
        self._channel: Channel[FrontendToCore, CoreToFrontend] = Channel(socket, FrontendToCore, "frontends")
        self._blobs = None if spec.core_listen is None else GatewayBlobs(spec)
        self._spec, self._touched, self._relay = spec, touched, relay
        self._sender_by_order: dict[str, int] = {}  # by order id: the gateway's frontend that has sent it
        self._frontend_by_identity: dict[bytes, int] = {}
        self._identity_by_frontend: dict[int, bytes] = {}
        self._num_greeted = 0
        self._heard_at: dict[bytes, float] = {}  # by gateway's frontend: its last message, monotonic seconds
        self._judged_at = 0.0
        self._model = None if spec.core_listen is None else spec.digest  # with the weights in use; for gateways
        if model_folder not in ("", spec.model_folder):
            self.use_weights(model_folder)
        self._loads = FrontendLoads()
        self._has_routers = spec.config.data_parallel_size > 1 or spec.core_listen is not None
        self.pool: PoolShape | None = None  # None until it is known; the engine is made then

    @property
    def wakers(self) -> list[zmq.Socket[bytes] | int]:
        """The sockets and descriptors to poll; `receive` handles them."""
        return [self._channel.socket, *([] if self._blobs is None else [self._blobs.fetcher.fd])]

    @property
    def blobs(self) -> NeededBlobs | None:
        """The blobs that requests of gateways need; None if the engine takes no gateways."""
        return None if self._blobs is None else self._blobs.needed

    def receive(self, engine: EngineCore) -> None:
        """Handle received messages, for at most INTAKE_S, and continue to fetch blobs from gateways."""
        for identity, message in self._channel.receive_from(INTAKE_S):
            try:
                self._on_message(identity, message, engine)
            except ProtocolError as error:
                self._channel.count_malformed(error)
        if self._blobs is not None:
            self._blobs.go_on(self.answer)

    def _on_message(self, identity: bytes, message: FrontendToCore, engine: EngineCore) -> None:
        frontend_id = self._frontend_by_identity.get(identity)
        if identity in self._heard_at:
            self._heard_at[identity] = time.monotonic()
        if isinstance(message, Hello):
            self._greet(identity, message, engine)
        elif isinstance(message, GatewayHello):
            self._greet_gateway(identity, message, engine)
        elif frontend_id is None:
            self._channel.send_to(identity, Unknown())
        elif isinstance(message, (BlobChunk, NoBlob)):
            if self._blobs is not None:
                self._blobs.fetcher.receive(frontend_id, message)
        elif isinstance(message, Order):
            self._sender_by_order[message.order_id] = frontend_id
            self._relay(msgspec.structs.replace(message, replica=self._spec.replica))
        elif isinstance(message, EngineCoreRequest):
            message = message if identity not in self._heard_at else _without_folder(message)
            self._touched.begin_adding(identity, message.children[0].key)
            maybe_fail("core.add", num_ids(message.prompt_token_ids))
            handle(frontend_id, message, engine, self.answer)
            self._touched.end_adding()
        else:
            handle(frontend_id, message, engine, self.answer)

    def _greet(self, identity: bytes, hello: Hello, engine: EngineCore) -> None:
        mine = (PROTOCOL_VERSION, self._spec.run_id, self._spec.fingerprint)
        if (hello.protocol_version, hello.run_id, hello.fingerprint) != mine:
            error = ProtocolError(
                f"a frontend of protocol {hello.protocol_version}, run {hello.run_id} spoke to a core of protocol "
                f"{PROTOCOL_VERSION}, run {self._spec.run_id}"
            )
            self._channel.send_to(identity, Refused(error=error_info(error)))
            return
        self._register(identity, engine)
        self._channel.send_to(identity, Welcome(protocol_version=PROTOCOL_VERSION, run_id=self._spec.run_id))

    def _greet_gateway(self, identity: bytes, hello: GatewayHello, engine: EngineCore) -> None:
        if self._model is None:
            error = ProtocolError("this engine takes no gateways: start it with --core-listen")
        elif hello.protocol_version != PROTOCOL_VERSION:
            versions = f"protocol {hello.protocol_version}, this engine {PROTOCOL_VERSION}"
            error = ProtocolError(f"the gateway speaks {versions}: use the same release")
        elif difference := hello.model.with_weights("").difference(self._model):
            error = ProtocolError(f"the engine serves another model than the gateway: {difference}")
        else:
            self._register(identity, engine)
            if self._blobs is not None:
                self._blobs.needed.add_frontend(self._frontend_by_identity[identity])
            self._judged_at = self._heard_at[identity] = time.monotonic()
            assert self.pool is not None, "there is an engine"
            max_model_len = self._spec.fitted_model_len(self.pool)
            welcome = GatewayWelcome(
                model=self._model, num_blocks=self.pool.num_usable + 1, max_model_len=max_model_len
            )
            self._channel.send_to(identity, welcome)
            return
        self._channel.send_to(identity, Refused(error=error_info(error)))

    def _register(self, identity: bytes, engine: EngineCore) -> None:
        if (known := self._frontend_by_identity.get(identity)) is not None:
            engine.drop_frontend(known)  # it has reconnected and submits its requests again
        else:
            self._frontend_by_identity[identity] = self._num_greeted
            self._identity_by_frontend[self._num_greeted] = identity
            self._num_greeted += 1

    # ── gateways ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def next_at(self) -> float | None:
        """Time to call `judge` and `tell_loads` next, in monotonic seconds; None if there are no gateways and no loads
        to report."""
        judged_at = self._judged_at + PING_INTERVAL_S if self._heard_at else None
        times = [when for when in (judged_at, self._loads.next_at) if when is not None]
        return min(times, default=None)

    def judge(self, engine: EngineCore, now: float) -> None:
        """Drop the frontends of gateways whose lease has ended: they have been silent for LEASE_S. None is dropped
        while messages are unread. All leases restart if this loop itself was stopped. `now`: monotonic seconds."""
        if not self._heard_at:
            return
        if now - self._judged_at > LEASE_S / 2:
            self._heard_at = dict.fromkeys(self._heard_at, now)
        self._judged_at = now
        if int(self._channel.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return
        for identity in [identity for identity, at in self._heard_at.items() if now - at > LEASE_S]:
            self.lose(identity, engine)

    def on_ordered(self, ordered: Ordered) -> None:
        """Pass the supervisor's reply to an order on to the gateway's frontend that has sent the order, if it came from
        one."""
        if (frontend_id := self._sender_by_order.pop(ordered.order_id, None)) is not None:
            self.answer(frontend_id, ordered)

    def use_weights(self, folder: str) -> None:
        """Record that the ranks have loaded the weights in `folder`, and send WeightsChanged to gateways."""
        if self._model is not None:
            self._model = self._model.with_weights(checkpoint_digest(Path(folder)))
            self.tell_gateways(WeightsChanged(weights=self._model.weights, model_folder=folder))

    def tell_gateways(self, message: Progress | ReplicaDown | WorkersUp | WeightsChanged) -> None:
        for identity in self._heard_at:
            self._channel.send_to(identity, message)

    # ── outputs ──────────────────────────────────────────────────────────────────────────────────────────────────

    def tell_loads(self, engine: EngineCore, now: float) -> None:
        """Send Load to each frontend for which the work of the others has changed, if frontends have routers. `now`:
        monotonic seconds."""
        if self._has_routers:
            changed = self._loads.changed(engine.open_requests, self._identity_by_frontend.keys(), now)
            for frontend_id, load in changed.items():
                self.answer(frontend_id, load)

    def note_admission(self, request: Request) -> None:
        """Record in TouchedAnswers that a request is about to be admitted to a step."""
        if (identity := self._identity_by_frontend.get(request.frontend_id)) is not None:
            self._touched.admit(identity, request.key)
        maybe_fail("core.admit", request.num_tokens)

    def send_outputs(self, engine: EngineCore) -> None:
        """Send the outputs of the engine. If a frontend is gone, end its requests."""
        for frontend_id, outputs in engine.take_outputs():
            identity = self._identity_by_frontend.get(frontend_id)
            if identity is not None and not self._channel.send_to(identity, outputs):
                self.lose(identity, engine)

    def answer(self, frontend_id: int, message: CoreToFrontend) -> None:
        """Send a message to a frontend, unless it is gone."""
        if (identity := self._identity_by_frontend.get(frontend_id)) is not None:
            self._channel.send_to(identity, message)

    def lose(self, identity: bytes, engine: EngineCore) -> None:
        """Forget a frontend that is gone, and end its requests."""
        frontend_id = self._frontend_by_identity.pop(identity, None)
        self._heard_at.pop(identity, None)
        if frontend_id is not None:
            del self._identity_by_frontend[frontend_id]
            logger.warning("a frontend is gone: its %d requests end", engine.drop_frontend(frontend_id))


def _listen_for_gateways(socket: zmq.Socket[bytes], spec: EngineSpec, address: str) -> None:
    assert spec.config.hosts_key_file is not None, "EngineConfig checks it"
    try:
        Keys.load(spec.config.hosts_key_file).listen(socket, CORES, address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen on --core-listen {address}: {error.strerror}; choose another") from None


def _without_folder(message: EngineCoreRequest) -> EngineCoreRequest:
    """Return a gateway's request without its adapter's folder, which is on another machine."""
    if message.adapter is None:
        return message
    return msgspec.structs.replace(message, adapter=msgspec.structs.replace(message.adapter, folder=""))


def handle(
    frontend_id: int, message: FrontendToCore, engine: EngineCore, answer: Callable[[int, CoreToFrontend], None]
) -> None:
    """Apply a message of a frontend that has sent Hello. `answer(frontend_id, message)` sends a reply, now or later."""
    if isinstance(message, EngineCoreRequest):
        engine.add_request(frontend_id, message)
    elif isinstance(message, AbortRequests):
        engine.abort(frontend_id, message.keys)
    elif isinstance(message, Prefetch):
        _prefetch(message, engine, partial(answer, frontend_id))
    elif isinstance(message, Ping):
        answer(frontend_id, Pong())


def _prefetch(message: Prefetch, engine: EngineCore, answer: Callable[[CoreToFrontend], None]) -> None:
    def done(num_tokens: int = 0) -> None:
        answer(Prefetched(prefetch_id=message.prefetch_id, num_tokens=num_tokens))

    if engine.offload is None:
        done()
    else:
        tokens, salt = message.prompt_token_ids, message.cache_salt
        engine.offload.prefetch(tokens, salt, message.adapter_digest, message.media, done)
