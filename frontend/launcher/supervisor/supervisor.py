"""Supervisor: starts, watches, replaces and stops frontends, cores and workers. No request passes through it.

Start: every rank sends Measured → all get the smallest pool in Initialize → every child sends Ready.
Losses: if one worker ends, the whole group is replaced by a new generation, while core and frontend keep running. A
lost core is restarted while the workers keep running, a lost frontend at its address. Requests resume from their
tokens. A tier process ends with its core, which gives it its orders; if it is lost, the engine runs without it until it
is back. The loop waits on one poller; its only periodic timers are the HealthMonitor's and, with several hosts, that of
the pings to their agents.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from signal import SIGUSR1, SIGUSR2

import zmq

from ....ipc.errors import EngineDead, ProtocolError, TokenloomError
from ....ipc.messages import supervisor as messages
from ....ipc.messages.base import Hello, Pong
from ....ipc.messages.orders import Held, Hold, Order, Ordered
from ....ipc.process import log
from ....ipc.process.awake_clock import AwakeClock
from ....ipc.process.service_manager import STOPPING, notify
from ....ipc.sockets.addresses import RunDirectory, lock_ipc_address, unlink_ipc_address
from ....ipc.spec.config.engine_spec import EngineSpec
from ...checkpoint.search import CheckpointSearch
from ...checkpoint.start_report import StartReport
from ...listening.http_listeners import HttpListeners
from .children import Child, Children
from .drain import DrainWatch
from .frontends.kept_connections import KeptConnections
from .frontends.reload import FrontendReload
from .frontends.spares import SpareFrontends
from .health_monitor import HealthMonitor
from .launcher import Launcher, ProcessSpec, Unit
from .losses import Losses
from .orders import Orders
from .process_specs import ProcessSpecs
from .publisher import Publisher
from .replica import Replica
from .rolling_restart import RollingRestart
from .roster import Roster
from .signal_watch import SignalWatch, StartInterrupted

logger = logging.getLogger("tokenloom.supervisor")

LONGEST_WAIT_S = 86400.0  # a poller's milliseconds have 31 bits
BEAT_S = 1.0  # of the clock that measures start and drain
STOP_TIMEOUT_S = 3.0  # from Stop to SIGKILL


class Supervisor:
    """Owner of the children; it replaces lost ones. Call `start`, then `run`, then always `stop`."""

    def __init__(
        self,
        spec: EngineSpec,
        run_directory: RunDirectory,
        listeners: HttpListeners,
        state_fds: Sequence[int],
        launcher: Launcher,
        announce: Callable[[str], None],
    ) -> None:
        """`stop` closes `listeners` and removes `run_directory`. `state_fds`: the lock of the state folder, which
        frontends inherit. announce: called with each line about start and drain."""
        self.spec = spec
        self.addresses = spec.client_addresses  # by frontend
        self.http_address = next(iter(listeners.addresses), None)
        self._listeners = listeners
        self._run_directory = run_directory
        self._announce = announce
        self._started_at = time.monotonic()
        self._clock = AwakeClock(BEAT_S)
        self._report = StartReport(announce, self._clock)
        self._children = Children(spec.endpoints.control, launcher)
        self._roster = Roster(spec, self._children)
        self._kept = KeptConnections(spec, listeners, self._children.poller)
        self._specs = ProcessSpecs(spec, self._roster.replicas, listeners, self._kept, state_fds)
        self.losses = Losses(
            run_directory, self._children, self._roster, self._kept, self._on_replica_lost, self._on_frontend_lost
        )
        self._spares = SpareFrontends(spec, self._children, self._roster, self._kept, self._new_spare)
        self._reload = FrontendReload(
            self._children, self._roster, self._spares, spec.config.start_timeout_s, self.losses.hand_over
        )
        self._search = CheckpointSearch(spec, self._wake)
        self._orders = Orders(
            self._roster,
            self._search.find,
            self._send_hold,
            self._reply,
            lambda number: self._rolling.begin(number),
            lambda: self._reload.begin(self._orders.on_reloaded),
        )
        self._rolling = RollingRestart(
            spec, self._roster, self._children, self.losses.replace, self.losses.report, self._orders.on_restarted
        )
        self.publisher = Publisher(
            self._children,
            self._roster,
            self.losses,
            self._report,
            announce,
            lambda: [*self.addresses, *self._listeners.addresses],
        )
        self._is_serving = False
        self._failure: TokenloomError | None = None
        self._health = HealthMonitor(self._children, spec.config.hang_timeout_s)
        self._drain = DrainWatch(self._children, self._roster)
        self._signals: SignalWatch | None = None  # set by start
        self._lock_fds: list[int] = []  # of --listen

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start all children and wait until they are ready. Raises the error of a child's Failed, StartInterrupted for
        a stop signal, and EngineDead otherwise."""
        if self.spec.config.listen and self.spec.config.listen.startswith("ipc://"):
            self._lock_fds += map(lock_ipc_address, self.addresses)
        self._signals = SignalWatch()
        self._children.poller.register(self._signals.fd, zmq.POLLIN)
        self._roster.start_at = dict.fromkeys(self._roster.units, self._started_at)
        self._start_due_units()
        deadline = self._clock.now + self.spec.config.start_timeout_s
        while not all(map(self._children.is_up, self._roster.units)):
            self._turn(self._clock.patience_s(deadline))
            if self._signals.stops:
                raise StartInterrupted(self._signals.stops[0])
            late = self._children.late(self._roster.start_at)
            self._report.announce_late(late)
            if self._clock.look() >= deadline:
                limit_s = self.spec.config.start_timeout_s
                raise EngineDead(f"{', '.join(late)} not ready after --start-timeout-s {limit_s:g} s")
        self._is_serving = True
        self._health.begin(time.monotonic() - self._started_at)
        self.publisher.publish_start()

    def _start(self, unit: Unit) -> None:
        """Start the processes of a unit."""
        if unit.role == "worker":
            self._roster.replicas[unit.place].holdings.abandon_change()
        self._roster.resting.discard(unit)
        if self._spares.take_over(unit):
            return
        specs = self._specs.of(unit, self._roster.numbers, self.addresses)
        self._report.forget_phases({spec.name for spec in specs})
        for spec in specs:
            self._children.spawn(spec)

    def _new_spare(self, unit: Unit, number: int) -> ProcessSpec:
        return self._specs.frontend(unit, number, self.addresses[unit.place], is_spare=True)

    # ── serve ────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Serve until a signal, then drain until done, timeout or a second signal. EngineDead after too many losses."""
        assert self._signals is not None, "start comes before run"
        while not self._signals.stops:
            self._turn(LONGEST_WAIT_S)
        self._finish(self._signals)

    def _finish(self, signals: SignalWatch) -> None:
        deadline = self._clock.look() + self.spec.config.drain_timeout_s
        self._drain.begin()
        self._announce("Draining: running requests finish, new ones are refused; another signal aborts")
        notify(STOPPING, "drains: running requests finish, new ones are refused")
        while not self._drain.is_over and len(signals.stops) < 2 and self._clock.look() < deadline:
            self._turn(self._clock.patience_s(deadline))

    def _turn(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for an event, then handle all waiting events. Raises the error that ends the
        engine."""
        self._children.poll(self._poll_timeout_ms(timeout_s))
        requests = self._signals.take_requests() if self._signals else ()
        if SIGUSR1 in requests:
            self.publisher.log_state(self._phase)
        if SIGUSR2 in requests:
            self._reload.begin()
        self._kept.go_on()
        self._roster.report_lost_arenas()
        for child, message in self._children.receive():
            if not self._spares.take_message(child, message):
                self._on_message(child, message)
        for lost in self._spares.take_lost():
            self._reload.on_lost(*lost)
        for child in self._children.ended():
            if not self._is_serving:  # a child's Failed says what the user has to change
                for each in self._children.receive_last_of(child):
                    self._on_message(*each)
            if not self._reload.take_end(child):
                self._on_loss(child, child.describe_end())
        if self._failure is not None:
            raise self._failure
        self._search.take()
        self._orders.go_on()
        self._reload.go_on()
        if self._phase == "serving":
            self._spares.keep()
        self._start_due_units()
        if hang := self._health.check():
            self._on_loss(*hang)

    def _poll_timeout_ms(self, timeout_s: float) -> int:
        now = time.monotonic()
        due = self._roster.startable(is_serving=self._is_serving).values()
        waits = [when - now for when in (*due, self._health.next_at, self._children.next_at, self._kept.next_at)]
        return max(int(min(*waits, LONGEST_WAIT_S, timeout_s) * 1000) + 1, 0)

    def _on_message(self, child: Child, message: messages.ChildToSupervisor) -> None:
        if isinstance(message, Hello):
            if mismatch := self.spec.mismatch(message):
                self._failure = ProtocolError(f"{child.spec.name} {mismatch}")
            self._children.send_kept(child)
        elif isinstance(message, messages.Phase):
            if message.name == "listen":
                self.addresses[child.spec.unit.place] = message.detail
            self._report.announce_phase(child.spec.name, message)
        elif isinstance(message, messages.PhaseProgress):
            self._report.announce_progress(child.spec.name, message)
        elif isinstance(message, messages.Measured):
            self._on_measured(child, message)
        elif isinstance(message, messages.AnswersPings):
            child.answers_pings = True
        elif isinstance(message, messages.Ready):
            self._on_ready(child)
        elif isinstance(message, messages.Failed):
            self._on_failed(child, message)
        elif isinstance(message, messages.ReplaceWorkers):
            workers = self._roster.replica_of(child).workers
            if message.generation == self._roster.numbers[workers]:
                self._on_loss(self._children.of(workers)[0], message.reason)
        elif isinstance(message, messages.Drained):
            self._drain.on_drained(child)
        elif isinstance(message, messages.ReplicaDrained):
            self._rolling.on_replica_drained(child, message)
        elif isinstance(message, Order):
            self._on_order(message)
        elif isinstance(message, Held):
            self._on_held(child, message)
        elif isinstance(message, messages.TierListening):
            child.address = message.address
        elif isinstance(message, (messages.Meeting, messages.Listening)):
            self._children.announce(message, self._roster.replica_of(child).workers)
        elif isinstance(message, (messages.HostPlaced, messages.HostGone)):
            self._children.on_placement(message)
        elif isinstance(message, (messages.Progress, messages.Served)):
            self._roster.on_progress(child, message)
            self.publisher.publish_progress()
        else:
            assert isinstance(message, Pong)

    # ── start messages ───────────────────────────────────────────────────────────────────────────────────────────

    def _on_measured(self, child: Child, measured: messages.Measured) -> None:
        child.measured = measured
        if (sizes := self._roster.on_measured(self._roster.replica_of(child), measured)) is not None:
            self._report.announce_sizes(self.spec, sizes, measured)

    def _on_ready(self, child: Child) -> None:
        child.is_ready, unit = True, child.spec.unit
        if unit.role in ("core", "tier"):
            self._roster.report_tiers(self._roster.replica_of(child))
        if not self._is_serving or not self._children.is_up(unit):
            return
        logger.info("%s is back", child.spec.name)
        if unit.role == "worker":
            workers_up = messages.WorkersUp(generation=self._roster.numbers[unit], replica=unit.place)
            self._children.send_to(self._roster.replica_of(child).core, workers_up)
            self._children.broadcast(workers_up, "frontend")
        elif unit.role == "core":
            core_up = messages.CoreUp(core_epoch=self._roster.numbers[unit], replica=unit.place)
            self._children.broadcast(core_up, "frontend")
        elif unit.role == "frontend":
            for each in self._roster.replicas:
                if not (self._children.is_up(each.core) and self._children.is_up(each.workers)):
                    self.losses.tell(each, self.losses.last, [child])
            self._rolling.on_frontend_ready(child)
            self._drain.on_frontend_lost_or_back()
        self.publisher.publish_start()
        self.publisher.publish_progress()
        self._rolling.on_changed()

    def _on_failed(self, child: Child, message: messages.Failed) -> None:
        """Record the reason that a child gives for its end. During the engine's start it becomes the engine's error."""
        child.failure = message.error.message
        if not self._is_serving:
            self._failure = self._failure or message.error.to_exception()

    # ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_order(self, order: Order) -> None:
        if order.action == "log_level":
            log.set_level(order.level)
            self._children.announce(messages.SetLogLevel(level=order.level), *self._roster.units)
            self._reply(Ordered(order_id=order.order_id))
        else:
            self._orders.add(order)

    def _on_held(self, core: Child, held: Held) -> None:
        """Record that a core has carried out an order. If the workers that changed their memory for it were lost before
        this message came, their successors have the old holding; then the core is replaced, to have the same."""
        replica = self._roster.replica_of(core)
        if held.generation in (None, self._roster.numbers[replica.workers]):
            self._orders.on_held(replica, held)
        else:
            self.losses.replace(replica.core)
            self.losses.report(replica, f"{core.spec.name} had other workers than those that were started last")

    def _send_hold(self, number: int, hold: Hold) -> None:
        self._children.send_to(self._roster.replicas[number].core, hold)

    def _reply(self, ordered: Ordered) -> None:
        self.publisher.publish_progress()  # the client may ask for it next
        self._children.broadcast(ordered, "frontend", "core")

    def _wake(self) -> None:
        """Wake `_turn` from another thread."""
        if self._signals is not None:
            self._signals.wake()

    # ── losses ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_loss(self, child: Child, reason: str) -> None:
        """Replace the unit of a process that ended or hangs, and the units that cannot continue without it. During the
        start, record EngineDead for `_turn` to raise; afterwards record the error, if any, that the losses cause."""
        if not self._is_serving:
            self._failure = self._failure or EngineDead(reason)
            return
        self.losses.on_loss(child, reason)
        self._reload.on_loss(child, reason)
        self._failure = self._failure or self.losses.failure
        self.publisher.publish_progress()

    def _on_replica_lost(self, replica: Replica, reason: str, has_core: bool) -> None:
        self._orders.on_lost(replica, reason, has_core=has_core)
        if not replica.units:  # it was given up
            self._rolling.on_changed()

    def _on_frontend_lost(self, identity: bytes) -> None:
        self._rolling.on_drained(identity)
        self._drain.on_frontend_lost_or_back()

    def _start_due_units(self) -> None:
        for unit, when in self._roster.startable(is_serving=self._is_serving).items():
            if when <= time.monotonic():
                del self._roster.start_at[unit]
                self._start(unit)

    @property
    def _phase(self) -> str:
        if not self._is_serving:
            return "starting"
        return "draining" if self._drain.is_on else "serving"

    # ── stop ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """End all children within STOP_TIMEOUT_S, or at once if the engine has not started; close the HTTP sockets and
        remove all files. May be called twice."""
        self._kept.close()
        for replica in self._roster.replicas:
            replica.arena.close()
        self._children.broadcast(messages.Stop(reason="" if self._failure is None else str(self._failure)))
        self._children.close(STOP_TIMEOUT_S if self._is_serving else 0.0)  # a start has nothing to finish
        self.remove_files()

    def remove_files(self) -> None:
        """Remove the run directory and the sockets of --listen and --uds."""
        self._run_directory.remove()
        self._listeners.remove_files()
        for address in self.addresses[: len(self._lock_fds)]:
            unlink_ipc_address(address)
