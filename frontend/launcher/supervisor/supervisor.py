"""Supervisor: starts, watches, replaces and stops frontends, cores and workers. No request passes through it.

Start: every rank sends Measured → all get the least number of blocks in Initialize → every child sends Ready.
Losses: if one worker ends, the whole group is replaced by a new generation, while core and frontend keep running. A
lost core restarts beside the workers, a lost frontend at its address. Requests resume from their tokens. A tier
process ends with its core, which has told it where to write; without it the engine goes on. The loop waits on one
poller; its only periodic timer is the HealthMonitor's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec
import zmq

from ....ipc.errors import EngineDead, ProtocolError, TokenloomError
from ....ipc.messages import supervisor as messages
from ....ipc.messages.base import PROTOCOL_VERSION, Hello, Pong
from ....ipc.notes.deadly import DeadlyRequests
from ....ipc.process import log
from ....ipc.process.awake_clock import AwakeClock
from ....ipc.process.log import log_always
from ....ipc.process.service_manager import READY, STOPPING, notify
from ....ipc.sockets.addresses import RunDirectory, lock_ipc_address, unlink_ipc_address
from ....ipc.spec.config.engine_spec import EngineSpec
from ...checkpoint.start_report import StartReport
from ...listening.http_listeners import HttpListeners
from ...listening.open_requests import path_of, take_left
from .children import Child, Children
from .drain import DrainWatch
from .engine_state import state_lines
from .health_monitor import HealthMonitor
from .launcher import Launcher, Unit
from .process_specs import ProcessSpecs
from .replica import Replica
from .replicas.restart_policy import MAX_DELAY_S
from .rolling_restart import RollingRestart
from .roster import Roster
from .signal_watch import SignalWatch, StartInterrupted

logger = logging.getLogger("tokenloom.supervisor")

LONGEST_WAIT_S = 86400.0  # a poller's milliseconds have 31 bits
BEAT_S = 1.0  # of the clock that measures start and drain
STOP_TIMEOUT_S = 3.0  # from Stop to SIGKILL
REST_S = 60.0  # before the next start of an optional process, or one of several frontends, that was lost too often


class Supervisor:
    """Owns the children and replaces lost ones. Call `start`, then `run`, then always `stop`."""

    def __init__(
        self,
        spec: EngineSpec,
        run_directory: RunDirectory,
        listeners: HttpListeners,
        launcher: Launcher,
        announce: Callable[[str], None],
    ) -> None:
        """`stop` closes `listeners` and removes `run_directory`. `announce` gets the lines of start and drain."""
        self.spec = spec
        self.addresses = spec.client_addresses  # by frontend
        self.http_address = next(iter(listeners.addresses), None)
        self._listeners = listeners
        self._num_requests_cut = 0  # HTTP requests that lost frontends left unfinished
        self._run_directory = run_directory
        self._deadly = DeadlyRequests(run_directory.path)
        self._announce = announce
        self._started_at = time.monotonic()
        self._clock = AwakeClock(BEAT_S)
        self._report = StartReport(announce, self._clock)
        self._children = Children(spec.endpoints.control, launcher)
        self._roster = Roster(spec, self._children)
        self._specs = ProcessSpecs(spec, self._roster.replicas, listeners)
        self._rolling = RollingRestart(spec, self._roster, self._children, self._replace, self._report_loss)
        self.rest_s, self.max_delay_s = REST_S, MAX_DELAY_S
        self._is_serving = False
        self._last_failure = ""
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
        self._publish_start()
        places = " and ".join(self._places)
        self._announce(f"Ready at {places} after {time.monotonic() - self._started_at:.2f} s")
        notify(READY, f"serves {self.spec.served_model_name} at {places}")

    def _start(self, unit: Unit) -> None:
        """Start the processes of a unit."""
        if unit.role == "worker":
            self._roster.replicas[unit.place].holdings.abandon_change()
        self._roster.resting.discard(unit)
        specs = self._specs.of(unit, self._roster.numbers, self.addresses)
        self._report.forget_phases({spec.name for spec in specs})
        for spec in specs:
            self._children.spawn(spec)

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
        """Wait at most `timeout_s` for an event, then handle all there are. Raises the error that ends the engine."""
        self._children.poll(self._poll_timeout_ms(timeout_s))
        if self._signals is not None and self._signals.take_state_request():
            self._log_state()
        self._roster.report_lost_arenas()
        for child, message in self._children.receive():
            self._on_message(child, message)
        for child in self._children.ended():
            if not self._is_serving:  # a child's Failed says what the user has to change
                for each in self._children.receive_last_of(child):
                    self._on_message(*each)
            self._on_loss(child, child.describe_end())
        if self._failure is not None:
            raise self._failure
        self._start_due_units()
        if hang := self._health.check():
            self._on_loss(*hang)

    def _poll_timeout_ms(self, timeout_s: float) -> int:
        now = time.monotonic()
        due = self._roster.startable(is_serving=self._is_serving).values()
        waits = [when - now for when in (*due, self._health.next_at, self._children.next_at)]
        return max(int(min(*waits, LONGEST_WAIT_S, timeout_s) * 1000) + 1, 0)

    def _on_message(self, child: Child, message: messages.ChildToSupervisor) -> None:
        if isinstance(message, Hello):
            self._check_hello(child, message)
            self._children.send_kept(child)
        elif isinstance(message, messages.Phase):
            if message.name == "listen":
                self.addresses[child.spec.unit.place] = message.detail
            self._report.announce_phase(child.spec.name, message)
        elif isinstance(message, messages.PhaseProgress):
            self._report.announce_progress(child.spec.name, message)
        elif isinstance(message, messages.Measured):
            self._on_measured(child, message)
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
        elif isinstance(message, (messages.RestartReplicas, messages.ReplicaDrained)):
            self._rolling.on_message(child, message)
        elif isinstance(message, (messages.Reloading, messages.Reloaded)):
            self._on_reload(child, message)
        elif isinstance(message, messages.SetLogLevel):
            log.set_level(message.level)
            self._children.announce(message, *self._roster.units)
        elif isinstance(message, messages.TierListening):
            child.address = message.address
        elif isinstance(message, (messages.Meeting, messages.Listening)):
            self._children.announce(message, self._roster.replica_of(child).workers)
        elif isinstance(message, (messages.HostPlaced, messages.HostGone)):
            self._children.on_placement(message)
        elif isinstance(message, (messages.Progress, messages.Served)):
            self._roster.on_progress(child, message)
            self._publish_progress()
        else:
            assert isinstance(message, Pong)

    # ── start messages ───────────────────────────────────────────────────────────────────────────────────────────

    def _check_hello(self, child: Child, hello: Hello) -> None:
        if (hello.protocol_version, hello.fingerprint) != (PROTOCOL_VERSION, self.spec.fingerprint):
            self._failure = ProtocolError(
                f"{child.spec.name} speaks protocol {hello.protocol_version} of run {hello.run_id}, "
                f"this is protocol {PROTOCOL_VERSION} of run {self.spec.run_id}"
            )

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
                    self._report_loss(each, self._last_failure, child)
            self._rolling.on_frontend_ready(child)
            self._drain.on_frontend_lost_or_back()
        self._publish_start()
        self._publish_progress()
        self._rolling.on_changed()

    def _publish_start(self) -> None:
        phases = messages.StartPhases(phases=self._report.phases, kernels=self._children.kernels())
        self._children.broadcast(phases, "frontend")

    def _on_failed(self, child: Child, message: messages.Failed) -> None:
        """Keep a child's reason for its end. During the engine's start it becomes the engine's error."""
        child.failure = message.error.message
        if not self._is_serving:
            self._failure = self._failure or message.error.to_exception()

    def _on_reload(self, core: Child, message: messages.Reloading | messages.Reloaded) -> None:
        """Record the begin or end of a reload, sleep or wake-up and confirm it to the core. Do nothing if these workers
        were lost: `_on_loss` has sent the core WorkersDown."""
        replica = self._roster.replica_of(core)
        if message.generation == self._roster.numbers[replica.workers]:
            replica.holdings.note(message)
            self._publish_progress()  # before the core answers the client
            self._children.send(core, message)

    # ── losses ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_loss(self, child: Child, reason: str) -> None:
        """Replace the unit of a process that ended or hangs, and units that need it. During the start or after too many
        losses let `_turn` raise EngineDead instead."""
        if not self._is_serving:
            self._failure = self._failure or EngineDead(reason)
            return
        logger.error("%s", reason)
        self._last_failure = reason
        unit, delay_s = child.spec.unit, self._roster.on_failure(child)
        if unit.role == "frontend":
            self._lose_frontend(child, delay_s, reason)
        elif unit.is_optional:
            self._lose_optional(child, delay_s)
        elif delay_s is None:
            self._give_up(self._roster.replica_of(child), unit, reason)
        else:
            self._lose_vital(child, delay_s, reason)

    def _lose_vital(self, child: Child, delay_s: float, reason: str) -> None:
        """Replace a core or a worker group after `delay_s`."""
        unit, replica = child.spec.unit, self._roster.replica_of(child)
        self._replace(unit, delay_s)
        if unit.role == "worker":
            self._children.send_to(replica.core, messages.WorkersDown(generation=child.spec.number, reason=reason))
            if any(not core.is_ready for core in self._children.of(replica.core)):  # it waits for the old generation
                self._replace(replica.core)
        elif replica.holdings.is_changing:  # some ranks may have read the order, others not
            self._replace(replica.workers)
        self._report_loss(replica, reason)
        self._publish_progress()

    def _report_loss(self, replica: Replica, reason: str, *frontends: Child) -> None:
        """Send ReplicaDown for a replica that has lost something, or was given up, to these frontends or to all."""
        has_core, touched = self._children.is_up(replica.core), replica.read_touched()
        for frontend in frontends or self._roster.frontend_children:
            keys = [each.key for each in touched if each.identity == frontend.spec.identity]
            down = messages.ReplicaDown(
                replica=replica.number, reason=reason, has_core=has_core, is_final=not replica.units, touched=keys
            )
            self._children.send(frontend, down)

    def _lose_frontend(self, child: Child, delay_s: float | None, reason: str) -> None:
        """Replace a frontend after `delay_s`. If that is None, after `rest_s` while another one is up, else after
        `max_delay_s`: what ends a frontend that was ready came from a caller, and no caller may end the engine."""
        unit, identity = child.spec.unit, child.spec.identity
        was_killed = child.process.was_killed
        if delay_s is None:
            has_others = any(self._children.is_up(each) for each in self._roster.frontends if each != unit)
            if not has_others and not child.is_ready:
                self._failure = EngineDead(f"the {unit.name} cannot be kept alive; last: {reason}")
                return
            delay_s = self.rest_s if has_others else self.max_delay_s
            if has_others:
                self._roster.resting.add(unit)
            others = "the others go on without it, and " if has_others else ""
            logger.error("the %s ends again and again: %sit is started again in %.0f s", unit.name, others, delay_s)
        self._replace(unit, delay_s)
        self._deadly.on_loss(identity.decode(), is_to_blame=not was_killed)
        self._num_requests_cut += take_left(path_of(self.spec.run_directory, identity.decode()))
        self._children.broadcast(messages.FrontendDown(identity=identity), "core")
        self._rolling.on_drained(identity)
        self._drain.on_frontend_lost_or_back()
        self._publish_progress()

    def _give_up(self, replica: Replica, unit: Unit, reason: str) -> None:
        """Take a replica off whose unit cannot be kept alive; the engine ends with its last one."""
        if len(self._roster.alive) == 1:
            self._failure = EngineDead(f"the {unit.name} cannot be kept alive; last: {reason}")
            return
        self._roster.give_up(replica)
        text = "the %s cannot be kept alive and its replica is taken off: %d of %d go on; last: %s"
        logger.error(text, unit.name, len(self._roster.alive), len(self._roster.replicas), reason)
        self._report_loss(replica, reason)
        self._rolling.on_changed()
        self._publish_progress()

    def _lose_optional(self, child: Child, delay_s: float | None) -> None:
        """Replace the tier or launcher process after `delay_s`, None: after `rest_s`; send TierDown to its core."""
        unit, replica = child.spec.unit, self._roster.replica_of(child)
        if delay_s is None:
            text = "the %s process ends again and again: the engine goes on without it and starts it again in %.0f s"
            logger.error(text, child.spec.name, self.rest_s)
        self._replace(unit, self.rest_s if delay_s is None else delay_s)
        if unit == replica.tier:
            replica.on_tier_lost()
            self._children.send_to(replica.core, messages.TierDown(number=child.spec.number))
        self._publish_progress()

    def _replace(self, unit: Unit, delay_s: float = 0.0) -> None:
        """Kill the processes of a unit; their successors start after `delay_s`. A tier process ends before its core,
        whose successor hands out the same slots."""
        if unit.role == "core":
            replica = self._roster.replicas[unit.place]
            replica.on_core_lost()
            if replica.tier in replica.units:
                self._replace(replica.tier)
        self._roster.replace(unit, delay_s)

    def _start_due_units(self) -> None:
        for unit, when in self._roster.startable(is_serving=self._is_serving).items():
            if when <= time.monotonic():
                del self._roster.start_at[unit]
                self._start(unit)

    def _publish_progress(self) -> None:
        """Send the engine's progress and state to the frontends, for /health and metrics."""
        self._children.broadcast(self._full_progress(), "frontend")

    def _full_progress(self) -> messages.Progress:
        """Return the last Progress of the cores, added up, with the fields that the supervisor knows."""
        return msgspec.structs.replace(
            self._roster.progress(), num_http_requests_cut=self._num_requests_cut, last_failure=self._last_failure
        )

    def _log_state(self) -> None:
        """Log the engine's state at any log level, since the operator asked for it."""
        now = time.monotonic()
        phase = "draining" if self._drain.is_on else "serving" if self._is_serving else "starting"
        places = self._places if self._is_serving else []
        for line in state_lines(self._roster.state(places, now - self._started_at, phase, self._full_progress())):
            log_always(logger, line)

    @property
    def _places(self) -> list[str]:
        """All addresses that the engine serves."""
        return [*self.addresses, *self._listeners.addresses]

    # ── stop ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """End all children within STOP_TIMEOUT_S, or at once if the engine has not started; close the HTTP sockets and
        remove all files. May be called twice."""
        self._listeners.close()
        for replica in self._roster.replicas:
            replica.arena.close()
        self._children.broadcast(messages.Stop(reason="" if self._failure is None else str(self._failure)))
        self._children.close(STOP_TIMEOUT_S if self._is_serving else 0.0)  # a start has nothing to finish
        self.remove_files()

    def remove_files(self) -> None:
        """Remove the run directory and the sockets of --listen and --uds."""
        self._run_directory.remove()
        self._listeners.remove_files()
        for address, _ in zip(self.addresses, self._lock_fds, strict=False):
            unlink_ipc_address(address)
