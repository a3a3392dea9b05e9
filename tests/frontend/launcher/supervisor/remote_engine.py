"""An engine whose processes have no pid on this machine, only a place and the control socket; the test plays them."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Sequence

import zmq

from tokenloom.frontend.launcher.supervisor.launcher import CORE, FRONTEND, TIER, WORKERS, ProcessSpec, Unit
from tokenloom.frontend.launcher.supervisor.replicas.restart_policy import MAX_FAILURES
from tokenloom.frontend.launcher.supervisor.supervisor import Supervisor
from tokenloom.frontend.listening.http_listeners import HttpListeners
from tokenloom.ipc.codec import Decoder, encode
from tokenloom.ipc.messages.base import Ping, Pong
from tokenloom.ipc.messages.supervisor import (
    ChildToSupervisor,
    Drain,
    Drained,
    HandOver,
    HostGone,
    HostPlaced,
    Initialize,
    Loaded,
    Measured,
    PlacesTaken,
    Progress,
    Ready,
    Stop,
    SupervisorToChild,
    TakeOver,
    TierDown,
    TierListening,
    TierUp,
)
from tokenloom.ipc.sockets.addresses import RunDirectory
from tokenloom.ipc.sockets.zmq_sockets import new_socket, receive
from tokenloom.ipc.spec.config.engine_spec import EngineSpec


class RemoteProcess:
    """A process of another host, of which only messages and an event descriptor are here."""

    is_blameless = was_killed = False

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        engine: EngineSpec,
        spec: ProcessSpec,
        spare_says: ChildToSupervisor | None,
    ) -> None:
        self.spec, self.place = spec, "pid 7 on host-1"
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self.has_ended = self.is_closed = False
        self.answers_pings = True
        self.received: list[SupervisorToChild] = []
        self._control = new_socket(context, zmq.DEALER, identity=spec.identity)
        self._control.connect(engine.endpoints.control)
        self.wake_fds: Sequence[int] = [self._event, int(self._control.getsockopt(zmq.FD))]
        self._decoder: Decoder[SupervisorToChild] = Decoder(SupervisorToChild)
        self.send(engine.hello)
        if "--spare" in spec.arguments:
            if spare_says is not None:
                self.send(spare_says)
        elif spec.unit.role == "worker":
            self.send(Measured(pool_bytes=9, block_bytes=(1,), device="none"))
        elif spec.unit.role in ("core", "tier", "launcher") or spec.number:
            if spec.host:
                self.send(TierListening(address=f"tcp://10.0.0.{spec.host}:{9 + spec.number}"))
            self.send(Ready())

    def send(self, message: ChildToSupervisor) -> None:
        self._control.send(encode(message))

    def turn(self) -> None:
        """Answer the supervisor's messages."""
        for (frame,) in receive(self._control):
            message = self._decoder.decode(frame)
            self.received.append(message)
            if isinstance(message, Initialize) and self.spec.unit.role == "worker":
                self.send(Ready())
            elif isinstance(message, Ping) and self.answers_pings:
                self.send(Pong())
            elif isinstance(message, TakeOver):
                self.send(Ready())
            elif isinstance(message, Drain):
                self.send(Drained())
            elif isinstance(message, (Stop, HandOver)):
                self.end()

    def has(self, kind: type[SupervisorToChild]) -> bool:
        return any(isinstance(each, kind) for each in self.received)

    @property
    def tier_notices(self) -> list[SupervisorToChild]:
        return [message for message in self.received if isinstance(message, (TierUp, TierDown))]

    @property
    def progress(self) -> Progress:
        """The last Progress that it received."""
        return [each for each in self.received if isinstance(each, Progress)][-1]

    def end(self) -> None:
        """End now, unless it has ended."""
        if not self.has_ended:
            self.has_ended = True
            os.eventfd_write(self._event, 1)

    def describe_exit(self) -> str:
        return f"{self.spec.name} was lost with host-1"

    def resident_bytes(self) -> int:
        return 5 << 20

    def take_starved_s(self) -> float:
        return 0.0

    def wait(self, timeout_s: float) -> None:
        if self._control.poll(int(max(timeout_s, 0) * 1000)):
            self.turn()

    def close(self) -> None:
        self.is_closed = True
        self._control.close()
        os.close(self._event)


class RemoteEngine:
    """A supervisor, and the launcher of its RemoteProcesses, which runs `script` at every turn of the supervisor."""

    wakers: Sequence[zmq.Socket[bytes]] = ()
    next_at = math.inf

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: EngineSpec, listeners: HttpListeners) -> None:
        self._context, self._spec = context, spec
        self.processes: list[RemoteProcess] = []
        self.obstacles: dict[Unit, str] = {}
        self.places_taken = PlacesTaken(placements=[])
        self.news: list[HostPlaced | HostGone] = []
        self.num_lost = self.num_refused = 0
        self.refusal: OSError | None = None  # of the machine to start a process
        self.spare_says: ChildToSupervisor | None = Loaded()  # a spare frontend, at its start
        self.script: Callable[[], None] = self.finish_start
        self.supervisor = Supervisor(spec, RunDirectory.create(), listeners, (), self, lambda line: None)
        self.policies = self.supervisor._roster.policies

    # ── the test's side ──────────────────────────────────────────────────────────────────────────────────────────

    def finish_start(self) -> None:
        if len(self.frontends) == self._spec.config.api_server_count:
            for frontend in self.frontends:
                frontend.send(Ready())
            self.script = lambda: None

    def start(self) -> None:
        self.supervisor.start()

    def stop_when(self, is_done: Callable[[], bool]) -> None:
        """End `run` at the turn in which `is_done` first returns True."""

        def script() -> None:
            if is_done():
                self.script = lambda: None
                os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGTERM)

        self.script = script

    def run_until(self, is_done: Callable[[], bool]) -> None:
        self.stop_when(is_done)
        self.supervisor.run()

    def wear_out(self, *units: Unit) -> None:
        """Let units have as many failures in a row as are excused."""
        for unit in units * MAX_FAILURES:
            self.policies[unit].on_failure()

    def of(self, unit: Unit) -> list[RemoteProcess]:
        return [process for process in self.processes if process.spec.unit == unit]

    @property
    def core(self) -> RemoteProcess:
        return self.of(CORE)[-1]

    @property
    def workers(self) -> list[RemoteProcess]:
        return self.of(WORKERS)

    @property
    def tier(self) -> RemoteProcess:
        return self.of(TIER)[-1]

    @property
    def frontends(self) -> list[RemoteProcess]:
        return [process for process in self.processes if process.spec.unit.role == FRONTEND.role]

    # ── the supervisor's side ────────────────────────────────────────────────────────────────────────────────────

    def listen(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        control: zmq.Socket[bytes],
        receive_placements: Callable[[], None],
    ) -> None: ...

    def num_hosts_lost(self, replica: int) -> int:
        return self.num_lost

    def obstacle(self, unit: Unit) -> str:
        return self.obstacles.get(unit, "")

    def on_placement(self, news: HostPlaced | HostGone) -> None:
        self.news.append(news)

    def close(self) -> None: ...

    def spawn(self, spec: ProcessSpec) -> RemoteProcess:
        if self.refusal is not None:
            self.num_refused += 1
            raise self.refusal
        self.processes.append(RemoteProcess(self._context, self._spec, spec, self.spare_says))
        return self.processes[-1]

    def turn(self) -> None:
        for process in self.processes:
            if not process.is_closed:
                process.turn()
        self.script()
