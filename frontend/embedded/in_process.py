"""InProcessEngine: frontend, core and one worker in the calling thread, for debuggers, profilers and tests.

The objects and messages are those of separate processes, without the sockets. Only `step` makes progress; it passes
every exception on to the caller.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path

from ...core.engine import EngineCore
from ...core.features.grammar.local_helper import LocalGrammarHelper
from ...core.features.new import Surroundings
from ...core.links.frontend_port import handle
from ...core.links.order_runner import OrderRunner
from ...ipc.errors import ConfigError
from ...ipc.kv.pool_shape import PoolShape
from ...ipc.messages.base import PROTOCOL_VERSION, Hello, Holding, Welcome
from ...ipc.messages.client import ClientMessage, FrontendMessage
from ...ipc.messages.core import CoreToFrontend
from ...ipc.messages.orders import Order, Ordered
from ...ipc.messages.supervisor import Initialize, SetLogLevel, StartPhases
from ...ipc.messages.workers import SchedulerOutput, TokenMask
from ...ipc.process import log
from ...ipc.process.awake_clock import steady_time
from ...ipc.sockets.addresses import RunDirectory
from ...ipc.spec.config.engine_config import EngineConfig
from ...workers.worker import Worker
from ..checkpoint.resolve import resolve
from ..checkpoint.search import CheckpointSearch
from ..client.transport import encode_client_message
from ..launcher.supervisor.orders import Orders
from ..launcher.supervisor.replicas.holdings import Holdings
from ..server.requests.frontend import Frontend
from ..server.requests.media.media_input import MediaInput
from ..server.text.chat_template import NO_MEDIA, ChatTemplate, check_template
from ..server.text.tokenizer import Tokenizer

_FRONTEND_ID = 0
NO_FRONTEND = "an engine inside a program has no frontend of its own to replace"


class _Steps:
    """Executor of the core that queues steps, and the oldest one's mask, until `InProcessEngine.step` runs them."""

    def __init__(self) -> None:
        self.waiting: deque[SchedulerOutput] = deque()
        self._mask: TokenMask | None = None

    def send(self, message: SchedulerOutput | TokenMask) -> None:
        if isinstance(message, TokenMask):
            self._mask = message
        else:
            self.waiting.append(message)

    def take_mask(self) -> TokenMask | None:
        mask, self._mask = self._mask, None
        return mask


class _Replica:
    """The only replica, and the list of all replicas, as Orders needs them."""

    number = 0

    def __init__(self, model_folder: str) -> None:
        self.holdings = Holdings(model_folder)
        self.alive = [self]

    def is_up(self, replica: _Replica) -> bool:
        return True


class InProcessEngine:
    """Engine in the calling thread: frontend, core and one worker. The run directory has no sockets."""

    def __init__(self, config: EngineConfig) -> None:
        if config.data_parallel_size != 1:
            raise ConfigError(
                f"in_process runs one replica, data_parallel_size is {config.data_parallel_size}: set it to 1"
            )
        if config.api_server_count != 1:
            raise ConfigError(f"in_process is one frontend, api_server_count is {config.api_server_count}: set it to 1")
        if config.tensor_parallel_size != 1:
            raise ConfigError(
                f"in_process runs one rank, tensor_parallel_size is {config.tensor_parallel_size}: set it to 1"
            )
        if config.distributed_executor_backend == "ray":
            raise ConfigError("in_process starts no process that Ray could place: leave one of them out")
        if config.http_address is not None or config.uds is not None:
            raise ConfigError("in_process serves no HTTP: leave http and uds out, or in_process")
        if config.has_tiers:
            raise ConfigError("in_process has no KV tiers: leave kv_host_bytes, kv_disk and so on out, or in_process")
        self._run_directory = RunDirectory.create()
        self._wakeup = threading.Event()
        self._steps = _Steps()
        try:
            check_template(config)
            self.spec = resolve(config, self._run_directory)
            self._worker = Worker(self.spec, rank=0, generation=0)
            for _ in self._worker.load():
                pass
            measured = self._worker.measure()
            pool = PoolShape.of(measured.pool_bytes, measured.block_bytes)
            self._worker.initialize(pool)
            surroundings = Surroundings(LocalGrammarHelper(self.spec), has_exact_drafts=measured.has_exact_drafts)
            self._core = EngineCore(self.spec, pool, self._steps, surroundings)
            self._replica = _Replica(self.spec.model_folder)
            self._runner = OrderRunner(
                self._core, lambda held: self._orders.on_held(self._replica, held), self._reload, self._profile
            )
            self._search = CheckpointSearch(self.spec, self._wakeup.set)
            self._orders = Orders(
                self._replica,
                self._search.find,
                send=lambda _, hold: self._runner.begin(hold),
                reply=self._reply,
                restart=lambda _: None,  # the frontend refuses it
                reload_frontends=lambda: self._orders.on_reloaded(NO_FRONTEND),
            )
            self._reloaded: Holding | None = None
            tokenizer = Tokenizer.load(Path(self.spec.tokenizer_folder), config.trust_remote_code)
            media = MediaInput.load(self.spec, tokenizer)
            marker = NO_MEDIA if media is None else media.placeholders.marker
            chat_template = ChatTemplate.of(self.spec, tokenizer, marker)
            self._frontend = Frontend(self.spec, tokenizer, chat_template, self._wakeup.set, media)
            self._frontend.adapters.load_modules()
        except BaseException:
            self._run_directory.remove()
            raise
        self._to_client: list[FrontendMessage] = []
        self._client = self._frontend.open_local(self._to_client.append).identity
        max_model_len = self.spec.fitted_model_len(pool)
        sizes = Initialize(pool=pool, num_all_blocks=pool.num_usable, max_model_len=max_model_len)
        self._frontend.on_control_message(sizes)
        self._frontend.on_control_message(StartPhases(phases=[], kernels=measured.kernels))
        self._frontend.connect()
        self._deliver()

    # ── interface of the transport ────────────────────────────────────────────────────────────────────────────────

    def send(self, message: ClientMessage) -> None:
        """Pass a client's message to the frontend; the next `step` processes it."""
        self._frontend.on_client_frame(self._client, encode_client_message(message))

    def step(self, timeout_s: float) -> list[FrontendMessage]:
        """Run one turn, with at most one step of the model, and return the messages to the client.

        Waits at most `timeout_s`, and only while threads work and nothing else can run: on a text, media, an adapter or
        the search for a checkpoint.
        """
        if not self._core.num_requests and not self._frontend.outbox.to_cores[0]:
            self._wakeup.wait(timeout_s if self._frontend.is_busy or self._search.num_open else 0)
        if self._wakeup.is_set():
            self._wakeup.clear()
            self._frontend.on_wakeup()
            self._search.take()
        core = self._core
        self._deliver()
        core.grammars.take()
        self._runner.go_on()
        if self._reloaded is not None:
            holding, self._reloaded = self._reloaded, None
            self._runner.on_reloaded(holding, generation=0)
        core.expire(steady_time())
        core.features.expire(core.look())
        core.step()
        core.grammars.take()
        if self._steps.waiting:
            assert self._worker.runner is not None, "the core sends no steps to a worker that is asleep"
            core.on_result(self._worker.runner.execute(self._steps.waiting.popleft(), self._steps.take_mask))
        elif self._worker.adapters is not None and core.adapters.table.filling:
            self._worker.adapters.wait(timeout_s)
        for filled in self._worker.adapters.take() if self._worker.adapters is not None else ():
            core.adapters.on_filled(filled)
        for _, outputs in core.take_outputs():
            self._frontend.on_core_message(outputs)
        progress = core.progress(time.monotonic())
        if progress is not None:
            self._frontend.on_control_message(progress)
        self._frontend.tick(time.monotonic())
        self._deliver()
        messages = self._to_client.copy()
        self._to_client.clear()
        return messages

    def close(self) -> None:
        self._frontend.intake.close()
        self._frontend.adapters.close()
        self._frontend.media.close()
        self._run_directory.remove()

    # ── between the parts ────────────────────────────────────────────────────────────────────────────────────────

    def _deliver(self) -> None:
        to_core = self._frontend.outbox.to_cores[0]
        messages = to_core.copy()
        to_core.clear()
        for message in messages:
            if isinstance(message, Hello):
                self._answer(_FRONTEND_ID, Welcome(protocol_version=PROTOCOL_VERSION, run_id=self.spec.run_id))
            else:
                handle(_FRONTEND_ID, message, self._core, self._answer)
        to_supervisor, self._frontend.outbox.to_supervisor = self._frontend.outbox.to_supervisor, []
        for order in to_supervisor:
            if isinstance(order, Order) and order.action == "log_level":
                log.set_level(order.level)
                self._frontend.on_control_message(SetLogLevel(level=order.level))
                self._reply(Ordered(order_id=order.order_id))
            elif isinstance(order, Order):
                self._orders.add(order)

    def _answer(self, frontend_id: int, message: CoreToFrontend) -> None:
        self._frontend.on_core_message(message)

    def _reply(self, ordered: Ordered) -> None:
        self._frontend.on_control_message(ordered)

    def _reload(self, holding: Holding) -> None:
        self._core.scheduler.take_step()
        self._worker.hold(holding)
        self._reloaded = holding

    def _profile(self, records: bool) -> None:
        self._runner.on_profiled(self._worker.recorder.switch(records))
