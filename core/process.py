"""CoreProcess (`python -m tokenloom.core.process`): the sockets and the loop of the core.

One loop: wait for a socket, apply results, accept requests and orders, schedule and send steps, send outputs. Decisions
about requests and steps are in engine.py.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from functools import partial

import zmq

from ..ipc.child import SupervisorChannel, run_child
from ..ipc.errors import EngineDead, ProtocolError
from ..ipc.messages.base import Holding, MemoryTag
from ..ipc.messages.orders import Hold, Ordered
from ..ipc.messages.supervisor import (
    ArenaLost,
    FrontendDown,
    Initialize,
    Phase,
    Ready,
    ReplaceWorkers,
    ReplicaDown,
    Stop,
    SupervisorToChild,
    TierDown,
    TierUp,
    WorkersDown,
    WorkersUp,
)
from ..ipc.messages.workers import ReloadWeights, SlotFilled
from ..ipc.notes.touched import TouchedAnswers
from ..ipc.process.awake_clock import AwakeClock, steady_time
from ..ipc.process.faults import maybe_fail
from ..ipc.process.malloc import return_large_blocks
from ..ipc.sockets.client_auth import CORES, GROUP, ZapHandler
from ..ipc.sockets.keys import Keys
from ..ipc.spec.config.engine_spec import EngineSpec
from .engine import BEAT_S, EngineCore
from .features.grammar.helper_process import GrammarHelperProcess
from .features.new import Surroundings
from .hang_detector import FIRST_LIMIT_S
from .kv.block_record import BlockRecord
from .links.event_port import EventPort
from .links.frontend_port import FrontendPort
from .links.order_runner import OrderRunner
from .links.tier_link import TierLink
from .links.worker_group import WorkerGroup
from .links.workers import Workers

logger = logging.getLogger("tokenloom.core")

BEATS_PER_TIMEOUT = 8  # fewest beats of the clock in a step's time limit: suspensions of up to 2 are not detected


class CoreProcess:
    """Owner of the sockets; `run` serves until the supervisor sends Stop."""

    _engine: EngineCore  # `_engine` and `_orders` are set when Initialize comes
    _orders: OrderRunner

    def __init__(
        self, spec: EngineSpec, core_epoch: int, generation: int, arena: int, model_folder: str, asleep: list[MemoryTag]
    ) -> None:
        self._spec, self._core_epoch, self._generation, self._asleep = spec, core_epoch, generation, asleep
        self._model_folder = model_folder or spec.model_folder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.supervisor = SupervisorChannel(self._context, spec, spec.identity("core", core_epoch))
        self._clock = AwakeClock(min(BEAT_S, (spec.config.step_timeout_s or FIRST_LIMIT_S) / BEATS_PER_TIMEOUT))
        self._zap = _new_zap(self._context, spec)
        self._grammar_helper = GrammarHelperProcess(spec)
        self._grammar_prover = GrammarHelperProcess(spec, is_prover=True)
        self._workers = Workers(self._open_group, spec.config)
        self._tier = TierLink(self._context, spec, arena)
        self._events: EventPort | None = None  # with --kv-events
        self._has_engine = self._is_ready = self._is_stopping = False

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        self._listen()
        poller, polled = zmq.Poller(), list[zmq.Socket[bytes] | int]()
        while not self._is_stopping:
            sources = self._sources
            if sources != polled:
                poller, polled = zmq.Poller(), sources
                for source in sources:
                    poller.register(source, zmq.POLLIN)
            poller.poll(self._patience_ms())
            self.turn()

    @property
    def _sources(self) -> list[zmq.Socket[bytes] | int]:
        """The sockets and descriptors that wake the loop. Before there is an engine, they are only those of the
        supervisor and of the check of keys."""
        sources: list[zmq.Socket[bytes] | int] = [self.supervisor.socket]
        if self._zap is not None:
            sources.append(self._zap.socket)
        if self._has_engine:
            sources += [*self._frontends.wakers, *self._grammar_helper.wakers, *self._grammar_prover.wakers]
            sources += [*self._tier.wakers, *self._workers.wakers]
            if self._events is not None:
                sources += self._events.wakers
        return sources

    def _listen(self) -> None:
        """Open the sockets for frontends and workers. ConfigError if there is no room or no free port for them."""
        self._touched = TouchedAnswers(self._spec.own_file("touched"))
        self._frontends = FrontendPort(
            self._context, self._spec, self._touched, self.supervisor.send, self._model_folder
        )
        self._executor = self._workers.listen(self._generation)

    def _start(self, message: Initialize) -> None:
        """Make the engine, with the pool's size from the message, and start to probe the ranks."""
        spec = self._spec
        record = None
        if spec.config.enable_prefix_caching and not spec.shares_prefixes:
            why = "tokens of %s see those behind them" if spec.model.is_encoder else "layers of %s keep states"
            logger.info(f"prefix caching is off: {why}", spec.model.architecture)
        if spec.shares_prefixes:
            record = BlockRecord(spec.own_file("blocks"), message.pool.all_blocks, self._generation)
        self._engine = EngineCore(
            spec,
            message.pool,
            self._executor,
            Surroundings(
                self._grammar_helper,
                self._grammar_prover,
                self._tier.tiers(message),
                self._frontends.blobs,
                self._frontends.note_admission,
                message.has_exact_drafts,
            ),
            core_epoch=self._core_epoch,
            generation=self._generation,
            record=record,
            clock=self._clock,
            asleep=self._asleep,
        )
        self._frontends.pool = message.pool
        if spec.config.kv_events is not None:
            events = self._engine.scheduler.kv_cache.attach_events()
            self._events = EventPort(self._context, spec.config, events.take, self._zap, spec.replica)
        self._orders = OrderRunner(self._engine, self.supervisor.send, self._reload, self._profile)
        self._has_engine = True
        self._workers.probe()

    def _patience_ms(self) -> int | None:
        """Return how long to poll, in ms: until the next deadline; None if there is no deadline."""
        if not self._has_engine:
            return None
        if self._events is not None and self._events.has_replays:
            return 0
        waits = [] if self._workers.wait_s is None else [self._workers.wait_s]
        if (deadline := self._engine.deadlines.next) is not None:
            waits.append(deadline - steady_time())
        if self._engine.offload is not None and (due := self._engine.offload.next_deadline) is not None:
            waits.append(due - time.monotonic())
        if (next_at := self._frontends.next_at) is not None:
            waits.append(next_at - time.monotonic())
        limits = [next_deadline() for next_deadline in self._engine.features.next_deadline]
        if (workers := self._workers.serving) is not None:
            limits += [self._engine.overdue_at, workers.order_overdue_at]
        waits += [self._clock.patience_s(limit) for limit in limits if limit is not None]
        return max(int(min(waits) * 1000) + 1, 0) if waits else None

    def turn(self) -> None:
        """Run one turn of the loop: receive results, requests and orders, then send steps and outputs."""
        maybe_fail("core.receive")
        if self._zap is not None:
            self._zap.answer()
        if not self._has_engine:
            self._receive_from_supervisor()
        if not self._has_engine:
            return
        try:
            now = self._engine.look()
            has_results = self._take_results()
            self._frontends.receive(self._engine)
            self._frontends.judge(self._engine, time.monotonic())
            self._receive_from_supervisor()
            self._engine.grammars.take()
            self._tier.go_on(self._engine.offload, is_idle=self._engine.scheduler.rows.num_active == 0)
            self._engine.expire(steady_time())
            self._engine.features.expire(now)
            maybe_fail("core.schedule")
            self._check_overdue(now)
            self._join()
            self._go_on_with_order()
            if self._workers.serving is not None:
                if has_results or not self._engine.has_suspects:  # the loss of a suspect's step counts for it alone
                    self._touched.forget_admitted()
                self._engine.step()
        except EngineDead as error:
            self._lose_workers(str(error))
        maybe_fail("core.send")
        self._frontends.send_outputs(self._engine)
        self._frontends.tell_loads(self._engine, time.monotonic())
        if self._events is not None:
            self._events.turn()
        self._report_progress()

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_results(self) -> bool:
        """Apply the workers' results. Return whether a step's result was among them. EngineDead if a result makes no
        sense."""
        has_results = False
        if (workers := self._workers.serving) is not None:
            try:
                for result in workers.receive():
                    if isinstance(result, SlotFilled):
                        self._engine.adapters.on_filled(result)
                    else:
                        self._engine.on_result(result)
                        has_results = True
            except ProtocolError as error:
                raise EngineDead(f"a worker's result makes no sense: {error}") from None
        return has_results

    def _check_overdue(self, now: float) -> None:
        """Raise EngineDead if a step or an order has taken too long at `now`. The caller takes `now` before it
        receives: if this process was suspended in between, a result may be waiting unread."""
        overdue_at = self._engine.overdue_at
        if self._workers.serving is not None and overdue_at is not None and now > overdue_at:
            raise EngineDead(f"the workers hang: no step has ended for {self._engine.step_timer.age_s:.1f} s")
        self._workers.check_order(now)

    def _reload(self, holding: Holding) -> None:
        """Send a reload to all ranks, in place of the next step."""
        workers = self._workers.serving
        assert workers is not None, "orders are carried out only with workers"
        workers.reload(self._engine.scheduler.take_step(), holding)

    def _profile(self, records: bool) -> None:
        workers = self._workers.serving
        assert workers is not None, "orders are carried out only with workers"
        workers.profile(self._engine.scheduler.take_step(), records)

    def _go_on_with_order(self) -> None:
        if (workers := self._workers.serving) is None or self._orders.hold is None:
            return
        self._frontends.send_outputs(self._engine)  # requests that end before the order is done are reported first
        done = workers.take_done()
        if isinstance(done, ReloadWeights):
            self._on_reloaded(done.holding, workers.generation)
        elif done is not None:
            self._orders.on_profiled(workers.order_error)
        else:
            self._orders.go_on()

    def _on_reloaded(self, holding: Holding, generation: int) -> None:
        if holding.model_folder:
            self._model_folder = holding.model_folder
            self._frontends.use_weights(holding.model_folder)
        self._tier.open(self._engine.offload, self._model_folder)
        self._orders.on_reloaded(holding, generation)

    def _lose_workers(self, reason: str) -> None:
        """Close the failed worker group and ask the supervisor for another; requests wait until it has joined."""
        generation = self._workers.generation
        assert generation is not None
        logger.error("%s", reason)
        self._workers.close()
        self._engine.lose_workers(reason)
        self._become_ready()  # it serves as soon as there are new workers
        self._tell_loss(reason)
        self.supervisor.send(ReplaceWorkers(generation=generation, reason=reason))

    def _on_workers_down(self, message: WorkersDown) -> None:
        """Close the worker group that the supervisor reports as ended, unless `_lose_workers` did so. If its ranks
        were changing what they hold, the next group has the holding from before."""
        if self._workers.generation == message.generation:
            self._take_results()  # results sent before the end are valid
            self._workers.close()
            self._engine.lose_workers(message.reason)
            self._tell_loss(message.reason)
        if self._workers.generation is None and self._orders.on_workers_lost():
            # the ranks were changing what they hold, and the blocks had lost their namespace for that
            self._tier.open(self._engine.offload, self._model_folder)

    def _tell_loss(self, reason: str) -> None:
        """Report the loss to gateways, which send this core's requests elsewhere until it has workers again."""
        self._frontends.tell_gateways(ReplicaDown(replica=0, reason=reason, has_core=True))

    def _open_group(self, generation: int) -> WorkerGroup:
        """Open the sockets for a worker group and return it; send the supervisor their addresses for ranks on other
        hosts."""
        workers = WorkerGroup(self._context, self._spec, self._core_epoch, generation, self._clock)
        if workers.listening is not None:
            self.supervisor.send(workers.listening)
        return workers

    def _gain_workers(self, generation: int) -> None:
        """Open the sockets for a new group and start to probe its ranks. A group that still serves is lost first."""
        if self._workers.serving is not None:
            self._engine.lose_workers("replaced by the supervisor")
        self._workers.listen(generation)
        self._workers.probe()

    def _join(self) -> None:
        """Use the group that is being probed once all its ranks have answered."""
        if (workers := self._workers.go_on_joining()) is None:
            return
        if self._is_ready:
            self._engine.gain_workers(workers, workers.generation)
            self._frontends.tell_gateways(WorkersUp(generation=workers.generation))
        else:
            self._engine.adapters.table.adopt(workers.slots)
            self.supervisor.send(Phase(name="workers joined", duration_s=self._workers.probing_s))
            self._become_ready()

    def _become_ready(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self.supervisor.send(Ready())

    # ── supervisor ───────────────────────────────────────────────────────────────────────────────────────────────

    def _receive_from_supervisor(self) -> None:
        for message in self.supervisor.receive():
            if isinstance(message, Stop):
                self._is_stopping = True
            elif isinstance(message, Initialize):
                self._start(message)
            elif isinstance(message, (TierUp, TierDown, ArenaLost)):
                offload = self._engine.offload if self._has_engine else None
                self._tier.on_notice(message, offload, self._model_folder)
            elif self._has_engine:
                self._on_notice(message)

    def _on_notice(self, message: SupervisorToChild) -> None:
        if isinstance(message, FrontendDown):
            self._frontends.lose(message.identity, self._engine)
        elif isinstance(message, WorkersDown):
            self._on_workers_down(message)
        elif isinstance(message, WorkersUp):
            self._gain_workers(message.generation)
        elif isinstance(message, Hold):
            self._orders.begin(message)
        elif isinstance(message, Ordered):
            self._frontends.on_ordered(message)

    def _report_progress(self) -> None:
        engine, now = self._engine, time.monotonic()
        progress = engine.progress(now)
        if progress is not None:
            self.supervisor.send(progress)
            self._frontends.tell_gateways(progress)
            line = engine.stats.log_line(engine.scheduler, now)
            if line and not self._spec.config.disable_log_stats:
                logger.info("%s", line)

    def close(self) -> None:
        self._grammar_helper.stop()
        self._grammar_prover.stop()
        if self._events is not None:
            self._events.close()
        self._context.destroy(linger=200)


def _new_zap(context: zmq.Context[zmq.Socket[bytes]], spec: EngineSpec) -> ZapHandler | None:
    """Return the handler that checks the keys of gateways and of ranks on other hosts; None if there are neither."""
    key_by_domain = {} if spec.group_keys is None else {GROUP: spec.group_keys.client_public}
    if spec.core_listen is not None and spec.config.hosts_key_file is not None:
        key_by_domain[CORES] = Keys.load(spec.config.hosts_key_file).client_public
    if not key_by_domain:
        return None
    first, *others = key_by_domain.items()
    zap = ZapHandler(context, first[1], first[0])
    for domain, key in others:
        zap.admit(domain, key)
    return zap


def main(process: type[CoreProcess] = CoreProcess) -> int:
    """Run the process that the command line describes."""
    parser = argparse.ArgumentParser(prog="tokenloom.core.process")
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--generation", type=int, default=0)
    parser.add_argument("--arena", type=int, default=0, help="number of the memory for blocks of KV tiers")
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--model-folder", default="", help="folder of the weights, if they were reloaded from another")
    parser.add_argument("--asleep", nargs="*", default=[], help="what the workers do not hold in memory")
    arguments = parser.parse_args()
    return_large_blocks()
    start = partial(
        process,
        core_epoch=arguments.epoch,
        generation=arguments.generation,
        arena=arguments.arena,
        model_folder=arguments.model_folder,
        asleep=arguments.asleep,
    )
    return run_child("core", start, replica=arguments.replica)


if __name__ == "__main__":
    sys.exit(main())
