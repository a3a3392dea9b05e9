"""RemoteCores: a gateway's connections to cores of engines elsewhere, which start and end while it runs.

All must serve the same model. From the connections a gateway learns the facts that an engine's supervisor reports to
its frontends: which cores are up, the sizes of their pools, and their progress.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec
import zmq

from ....ipc.kv.pool_shape import PoolShape
from ....ipc.messages.base import PING_INTERVAL_S, PROTOCOL_VERSION, Welcome
from ....ipc.messages.blobs import GetBlob
from ....ipc.messages.core import CoreToFrontend, FrontendToCore, GatewayWelcome, ModelDigest, WeightsChanged
from ....ipc.messages.orders import Order, Ordered
from ....ipc.messages.progress_sum import add_up
from ....ipc.messages.supervisor import CoreUp, Initialize, Progress, ReplicaDown
from ....ipc.sockets.keys import Keys
from ....ipc.spec.config.engine_spec import EngineSpec
from .blob_sender import BlobSender
from .remote_core import NO_PROGRESS, RemoteCore, logger
from .remote_orders import RemoteOrders

PATIENCE_S = 3.0  # time for which a starting gateway waits for its first core


class RemoteCores:
    """The cores of --cores; a core's number is its place in that list."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        spec: EngineSpec,
        identity: bytes,
        counts: Counter[str],
        wake: Callable[[], None],
        reply: Callable[[Ordered], None],
    ) -> None:
        """`wake` is called from a thread and must cause a call of `send`. `reply` gets the replies to orders."""
        assert spec.config.hosts_key_file is not None and spec.digest is not None, "EngineConfig checks it"
        keys, identity = Keys.load(spec.config.hosts_key_file), f"{spec.run_id[:8]}/".encode() + identity
        self._cores = [
            RemoteCore(context, address, number, identity, keys, counts)
            for number, address in enumerate(spec.remote_cores)
        ]
        self._orders = RemoteOrders(self._cores, reply)
        self._blobs = BlobSender(spec, wake)
        self._folder = ""  # folder, on the engines' machines, of the weights reloaded last
        self._run_id, self._model, self._max_model_len = spec.run_id, spec.digest, spec.max_model_len
        self._own_progress = NO_PROGRESS  # the report of the gateway's supervisor
        self._begun_at = time.monotonic()
        self.next_at = self._begun_at + PING_INTERVAL_S

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        return [socket for core in self._cores for socket in core.sockets]

    def receive(self, now: float) -> Iterator[tuple[int, CoreToFrontend | CoreUp | Initialize]]:
        """Yield the messages and events of the cores for the frontend, each with the number of its core. Reports are
        those of all cores together; replies to orders, new weights and requests for blobs are handled here."""
        for number, core in enumerate(self._cores):
            for message in core.receive(now):
                if isinstance(message, GatewayWelcome):
                    if self._accepts(core, message.model):
                        core.on_used()
                        yield number, self._sizes()
                        yield number, Welcome(protocol_version=PROTOCOL_VERSION, run_id=self._run_id)
                        yield number, self._progress()
                        self._orders.on_used(number)
                elif isinstance(message, Ordered):
                    self._orders.on_ordered(number, message)
                elif isinstance(message, Progress):
                    yield number, self._progress()
                elif isinstance(message, WeightsChanged):
                    self._on_weights(core, message)
                elif isinstance(message, GetBlob):
                    self._blobs.ask(number, message)
                else:
                    yield number, message
                if isinstance(message, ReplicaDown) and not message.has_core:
                    self._orders.on_lost(number, message.reason)
                    yield number, self._progress()
        if now >= self.next_at:
            self.next_at = now + PING_INTERVAL_S
            for core in self._cores:
                core.ping(now)

    def _accepts(self, core: RemoteCore, model: ModelDigest) -> bool:
        """Return whether a core may be used: its model, including the weights, must be that of the other cores. If the
        gateway does not know the weights, the first core sets them. A core that only lacks the weights reloaded last
        loads these first."""
        if difference := self._model.difference(model):
            is_behind = not self._model.difference(model.with_weights(""))
            if is_behind and self._folder and not core.has_caught_up:
                core.catch_up(self._folder)
                return False
            core.refuse(f"the engine serves another model than the gateway: {difference}")
            return False
        self._model = model if not self._model.weights else self._model
        return True

    def _on_weights(self, core: RemoteCore, message: WeightsChanged) -> None:
        """Record the new weights if a core in use has reloaded: other cores need these weights to be accepted from now
        on."""
        if core.is_used:
            self._model, self._folder = self._model.with_weights(message.weights), message.model_folder
            logger.info("the core at %s serves the weights in %s now", core.address, message.model_folder)

    def _sizes(self) -> Initialize:
        sizes = [core.sizes for core in self._cores if core.sizes is not None]
        pools = [each.num_blocks for each in sizes]
        return Initialize(
            pool=PoolShape(min(pools), 1, (1,)),
            num_all_blocks=sum(pools) - len(pools),
            max_model_len=min(self._max_model_len, *(each.max_model_len for each in sizes)),
        )

    def _progress(self) -> Progress:
        own = self._own_progress
        return msgspec.structs.replace(
            add_up([core.progress for core in self._cores]),
            num_restarts=own.num_restarts,
            num_http_answers_resumed=own.num_http_answers_resumed,
            num_http_answers_cut=own.num_http_answers_cut,
            frontends=own.frontends,
            last_failure=own.last_failure,
            is_core_up=any(core.is_used for core in self._cores),
        )

    def complete(self, progress: Progress) -> Progress:
        """Return a report of the gateway's supervisor, completed with the reports of the cores."""
        self._own_progress = progress
        return self._progress()

    def send(self, unsent: Sequence[list[FrontendToCore]]) -> None:
        """Send each core its messages from `unsent`, and clear the lists; then send the parts of blobs that have been
        read."""
        for core, messages in zip(self._cores, unsent, strict=True):
            core.send(messages)
            messages.clear()
        for number, reply in self._blobs.take():
            self._cores[number].send([reply])

    def take_order(self, order: Order) -> bool:
        """Send an order to the engines. Return False for one that is for the gateway's own processes."""
        if order.action in ("log_level", "reload_frontends"):
            return False
        self._orders.add(order)
        return True

    def may_begin(self, now: float) -> bool:
        """Return whether the frontend may serve without any core: PATIENCE_S after the start, since engines may take
        long to be ready."""
        return now >= self._begun_at + PATIENCE_S

    def close(self) -> None:
        for core in self._cores:
            core.close()
