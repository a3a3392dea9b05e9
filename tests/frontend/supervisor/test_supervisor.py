"""The supervisor runs an engine whose processes have no pid on this machine, only a place and the control socket."""

from __future__ import annotations

import errno
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from tokenloom.frontend.listening.http_listeners import HttpListeners
from tokenloom.frontend.supervisor import supervisor as supervisor_module
from tokenloom.frontend.supervisor.launcher import CORE, FRONTEND, LAUNCHER, TIER, WORKERS, ProcessSpec, Unit
from tokenloom.frontend.supervisor.replicas.restart_policy import MAX_FAILURES
from tokenloom.frontend.supervisor.signal_watch import STOP_SIGNALS
from tokenloom.frontend.supervisor.supervisor import Supervisor
from tokenloom.ipc.addresses import RunDirectory
from tokenloom.ipc.codec import Decoder, encode
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.config.engine_spec import EngineSpec
from tokenloom.ipc.errors import ConfigError, EngineDead, error_info
from tokenloom.ipc.messages.base import Ping, Pong, Rank
from tokenloom.ipc.messages.supervisor import (
    ArenaLost,
    ChildToSupervisor,
    Drain,
    Drained,
    Failed,
    FrontendDown,
    HostGone,
    HostPlaced,
    Initialize,
    Listening,
    Measured,
    Meeting,
    PlacesTaken,
    Progress,
    Ready,
    ReplicaDown,
    Served,
    Stop,
    SupervisorToChild,
    TierDown,
    TierListening,
    TierUp,
    WorkersDown,
    WorkersUp,
)
from tokenloom.ipc.process.arena import ArenaShape
from tokenloom.ipc.sockets import new_socket, receive
from tokenloom.tests.support.engine_specs import new_spec

DEADLINE_S = 20
HANG_TIMEOUT_S = 0.5
LISTENING = Listening(generation=0, steps="tcp://10.0.0.1:7", results="tcp://10.0.0.1:8")
TWO_HOSTS = {"hosts": 2, "listen_hosts": "tcp://10.0.0.9:7100", "hosts_key_file": "hosts.key"}
TIERS = {"kv_host_bytes": 1 << 20, "kv_disk": "/nowhere"}
WITH_TIERS = pytest.mark.parametrize("launcher", [TIERS], indirect=True)


class RemoteProcess:
    """A process of another host, of which only messages and an event descriptor are here."""

    is_blameless = was_killed = False

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], engine: EngineSpec, spec: ProcessSpec) -> None:
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
        if spec.unit.role == "worker":
            self.send(Measured(max_blocks=9, block_bytes=1, device="none"))
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
            elif isinstance(message, Drain):
                self.send(Drained())
            elif isinstance(message, Stop):
                self.end()

    def end(self) -> None:
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


class RemoteLauncher:
    """Starts RemoteProcesses and runs `script` at every turn of the supervisor."""

    wakers: Sequence[zmq.Socket[bytes]] = ()
    next_at = math.inf

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], engine: EngineSpec) -> None:
        self._context, self._engine = context, engine
        self.processes: list[RemoteProcess] = []
        self.obstacles: dict[Unit, str] = {}
        self.places_taken = PlacesTaken(placements=[])
        self.news: list[HostPlaced | HostGone] = []
        self.num_lost = self.num_refused = 0
        self.refusal: OSError | None = None  # of the machine to start a process
        self.script: Callable[[], None] = self._finish_start

    def _finish_start(self) -> None:
        self.of(FRONTEND)[0].send(Ready())
        self.script = lambda: None

    def listen(self, context: zmq.Context[zmq.Socket[bytes]], control: zmq.Socket[bytes]) -> None: ...

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
        self.processes.append(RemoteProcess(self._context, self._engine, spec))
        return self.processes[-1]

    def turn(self) -> None:
        for process in self.processes:
            if not process.is_closed:
                process.turn()
        self.script()

    def of(self, unit: Unit) -> list[RemoteProcess]:
        return [process for process in self.processes if process.spec.unit == unit]


@pytest.fixture
def launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[RemoteLauncher]:
    """Options of the engine are the parameter of the fixture."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    numbers = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    signal.alarm(DEADLINE_S)
    options = {"tensor_parallel_size": 2, "hang_timeout_s": HANG_TIMEOUT_S, **getattr(request, "param", {})}
    config = EngineConfig(**options)
    with zmq.Context() as context:
        yield RemoteLauncher(context, new_spec(run_directory=str(tmp_path), config=config))
    signal.alarm(0)
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def listeners(launcher: RemoteLauncher, tmp_path: Path) -> HttpListeners:
    listeners = HttpListeners()
    listeners.open(EngineConfig(http="127.0.0.1:0", uds=str(tmp_path / "http.sock")))
    return listeners


@pytest.fixture
def supervisor(launcher: RemoteLauncher, listeners: HttpListeners) -> Iterator[Supervisor]:
    supervisor = Supervisor(launcher._engine, RunDirectory.create(), listeners, launcher, lambda line: None)
    yield supervisor
    supervisor.stop()
    assert all(process.is_closed for process in launcher.processes)


def test_a_lost_remote_worker_replaces_its_group_and_the_others_stay(
    launcher: RemoteLauncher,
    supervisor: Supervisor,
    listeners: HttpListeners,
    caplog: pytest.LogCaptureFixture,
) -> None:
    supervisor.start()
    places = " and ".join([supervisor.addresses[0], *listeners.addresses])
    assert "http://" in places and "unix:" in places
    launcher.processes[1].end()

    def stop_when_replaced() -> None:
        (core,) = launcher.of(CORE)
        if WorkersUp(generation=1) in core.received:
            launcher.script = lambda: None
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)

    launcher.script = stop_when_replaced
    with caplog.at_level("INFO", logger="tokenloom"):
        supervisor.run()
    started = [(process.spec.unit, process.spec.number, process.spec.rank) for process in launcher.processes]
    group = [Rank(0, 0), Rank(0, 1)]
    old, new = ([(WORKERS, generation, rank) for rank in group] for generation in (0, 1))
    assert started == [*old, (CORE, 0, None), (FRONTEND, 0, None), *new]
    down = WorkersDown(generation=0, reason="worker 1 was lost with host-1")
    assert down in launcher.of(CORE)[0].received
    assert any(line.startswith(f"state: serving at {places}, up") for line in caplog.messages)
    assert "state: worker 1: pid 7 on host-1, ready, generation 1, 5 MiB" in caplog.messages


NO_PROCESS = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def test_a_process_that_cannot_be_started_is_tried_again(launcher: RemoteLauncher, supervisor: Supervisor) -> None:
    supervisor.start()
    launcher.refusal = NO_PROCESS
    launcher.of(CORE)[0].end()

    def relent() -> bool:
        if launcher.num_refused == 2:
            launcher.refusal = None
        return len(launcher.of(CORE)) == 2

    stop_when(launcher, relent)
    supervisor.run()
    last = [each for each in launcher.of(FRONTEND)[0].received if isinstance(each, Progress)][-1]
    remedy = "raise the limit of processes (ulimit -u, pids.max of the cgroup)"
    assert last.last_failure == f"core cannot be started: Resource temporarily unavailable: {remedy}"


def test_a_process_that_cannot_be_started_at_the_engines_start_ends_it_with_the_remedy(
    launcher: RemoteLauncher, supervisor: Supervisor
) -> None:
    launcher.refusal, launcher.script = OSError(errno.EMFILE, "Too many open files"), lambda: None
    with pytest.raises(EngineDead, match=r"worker 0 cannot be started: Too many open files: .*ulimit -n"):
        supervisor.start()


def test_a_remote_process_that_ends_during_the_start_ends_the_engine(
    launcher: RemoteLauncher, supervisor: Supervisor
) -> None:
    launcher.script = lambda: launcher.of(CORE)[0].end()
    with pytest.raises(EngineDead, match="core was lost with host-1"):
        supervisor.start()


def test_the_reason_of_a_failed_start_counts_even_if_it_arrives_after_the_end_of_its_process(
    launcher: RemoteLauncher, supervisor: Supervisor
) -> None:
    failed = Failed(error=error_info(ConfigError("port 1 is taken")))

    def fail() -> None:
        frontend = launcher.of(FRONTEND)[0]
        frontend.end()
        threading.Timer(0.2, frontend.send, [failed]).start()
        launcher.script = lambda: None

    launcher.script = fail
    with pytest.raises(ConfigError, match="port 1 is taken"):
        supervisor.start()


def test_a_core_that_was_ready_long_before_the_frontend_does_not_count_as_hung(
    launcher: RemoteLauncher, supervisor: Supervisor
) -> None:
    begun = time.monotonic()

    def finish_late() -> None:
        if time.monotonic() > begun + 2 * HANG_TIMEOUT_S:
            launcher.of(FRONTEND)[0].send(Ready())
            launcher.script = stop_after_pings

    def stop_after_pings() -> None:
        if Ping() in launcher.of(CORE)[-1].received:
            launcher.script = lambda: None
            os.kill(os.getpid(), signal.SIGTERM)

    launcher.script = finish_late
    supervisor.start()
    supervisor.run()
    assert [process.spec.number for process in launcher.processes] == [0, 0, 0, 0]


def test_workers_start_when_what_they_wait_for_is_there(launcher: RemoteLauncher, supervisor: Supervisor) -> None:
    launcher.obstacles[WORKERS] = "1 more host of 2"

    def come() -> None:
        assert [process.spec.unit for process in launcher.processes] == [CORE, FRONTEND]
        launcher.obstacles.clear()
        launcher.script = launcher._finish_start

    launcher.script = come
    supervisor.start()
    assert len(launcher.of(WORKERS)) == 2


def test_a_process_that_is_lost_with_its_host_is_no_failure_and_the_frontends_learn_what_is_missing(
    launcher: RemoteLauncher, supervisor: Supervisor
) -> None:
    supervisor.start()
    (frontend,) = launcher.of(FRONTEND)
    seen: list[str] = []

    def lose_the_host() -> bool:
        process = launcher.of(WORKERS)[-1]
        if process.spec.number <= MAX_FAILURES and not process.has_ended:
            launcher.obstacles[WORKERS] = "1 more host of 2"
            process.is_blameless = True
            process.end()
        elif launcher.obstacles:
            seen.extend(each.obstacle for each in frontend.received if isinstance(each, Progress))
            launcher.obstacles.clear()
        return process.spec.number > MAX_FAILURES

    stop_when(launcher, lose_the_host)
    supervisor.run()
    assert "1 more host of 2" in seen
    last = [each for each in frontend.received if isinstance(each, Progress)][-1]
    assert last.num_restarts == MAX_FAILURES + 1


@pytest.mark.parametrize("kind", [Meeting, Listening])
def test_a_rank_that_connects_late_learns_where_the_others_are(
    launcher: RemoteLauncher, supervisor: Supervisor, kind: type[Meeting | Listening]
) -> None:
    message = Meeting(generation=0, address="tcp://10.0.0.1:9") if kind is Meeting else LISTENING
    supervisor.start()
    sender = launcher.of(WORKERS if kind is Meeting else CORE)[0]
    sender.send(message)

    def is_done() -> bool:
        last = launcher.of(WORKERS)[-1]
        if message in last.received and last.spec.number == 0:
            last.end()
        return message in last.received and last.spec.number == 1

    stop_when(launcher, is_done)
    supervisor.run()


# ── the tier process ─────────────────────────────────────────────────────────────────────────────────────────────────


def stop_when(launcher: RemoteLauncher, is_done: Callable[[], bool]) -> None:
    """End `Supervisor.run` at the turn in which `is_done` first returns True."""

    def script() -> None:
        if is_done():
            launcher.script = lambda: None
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)

    launcher.script = script


def tier_notices(core: RemoteProcess) -> list[SupervisorToChild]:
    return [message for message in core.received if isinstance(message, (TierUp, TierDown))]


@WITH_TIERS
def test_workers_and_tier_process_inherit_one_arena_that_outlives_them(
    launcher: RemoteLauncher, supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor.start()
    launcher.of(TIER)[0].end()
    launcher.of(WORKERS)[0].end()
    (core,) = launcher.of(CORE)
    stop_when(launcher, lambda: {WorkersUp(generation=1), TierUp(number=1)} <= set(core.received))
    with caplog.at_level("INFO", logger="tokenloom"):
        supervisor.run()
    users = [*launcher.of(WORKERS), *launcher.of(TIER)]
    assert len(users) == 4 + 2
    fds = {tuple(process.spec.inherited_fds) for process in users}
    ((fd,),) = fds
    assert os.fstat(fd).st_size == 256 * 4096  # a slot takes a page
    assert all(f"--arena-fd={fd}" in process.spec.arguments for process in users)
    assert [process.spec.arguments[0] for process in launcher.of(TIER)] == ["--number=0", "--number=1"]
    sizes = Initialize(num_blocks=9, arena=ArenaShape(num_slots=256, slot_bytes=2))  # a byte of each rank
    assert all(sizes in process.received for process in (*users, core))
    assert "state: tier: pid 7 on host-1, ready, number 1, 5 MiB" in caplog.messages
    supervisor.stop()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@WITH_TIERS
def test_the_core_learns_of_a_lost_tier_process_after_its_end(
    launcher: RemoteLauncher, supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor.start()
    (tier,), (core,) = launcher.of(TIER), launcher.of(CORE)
    tier.answers_pings = False
    is_reaped: list[bool] = []

    def is_done() -> bool:
        if TierDown(number=0) in core.received:
            is_reaped.append(tier.is_closed)
        return TierUp(number=1) in core.received

    stop_when(launcher, is_done)
    supervisor.run()
    assert any("tier hangs: no sign of life" in line for line in caplog.messages)
    assert is_reaped and all(is_reaped)
    assert tier_notices(core) == [TierUp(number=0), TierDown(number=0), TierUp(number=1)]
    assert [process.spec.number for process in launcher.processes] == [0, 0, 0, 0, 0, 1]


@WITH_TIERS
def test_the_core_learns_of_a_lost_arena_before_the_next_tier_process(
    launcher: RemoteLauncher, supervisor: Supervisor
) -> None:
    supervisor.start()
    (core,) = launcher.of(CORE)
    launcher.num_lost = 1
    launcher.of(TIER)[0].end()
    stop_when(launcher, lambda: TierUp(number=1) in core.received)
    supervisor.run()
    notices = [each for each in core.received if isinstance(each, (TierUp, TierDown, ArenaLost))]
    assert notices == [TierUp(number=0), ArenaLost(arena=1), TierDown(number=0), TierUp(number=1)]


@WITH_TIERS
def test_a_later_core_begins_with_the_number_of_the_arena(launcher: RemoteLauncher, supervisor: Supervisor) -> None:
    supervisor.start()
    launcher.num_lost = 2
    launcher.of(CORE)[0].end()
    stop_when(launcher, lambda: len(launcher.of(CORE)) == 2 and TierUp(number=1) in launcher.of(CORE)[1].received)
    supervisor.run()
    arguments = [list(core.spec.arguments) for core in launcher.of(CORE)]
    assert [words[words.index("--arena") + 1] for words in arguments] == ["0", "2"]


@pytest.mark.parametrize("launcher", [TIERS | TWO_HOSTS], indirect=True)
def test_each_host_has_a_tier_process_and_all_are_replaced_together(
    launcher: RemoteLauncher, supervisor: Supervisor
) -> None:
    supervisor.start()
    (core,) = launcher.of(CORE)
    launcher.of(TIER)[1].end()
    stop_when(launcher, lambda: TierUp(number=1, others=("tcp://10.0.0.1:10",)) in core.received)
    supervisor.run()
    assert [(process.spec.host, process.spec.number) for process in launcher.of(TIER)] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]
    assert all(bool(process.spec.inherited_fds) == (process.spec.host == 0) for process in launcher.of(TIER))
    ups = [TierUp(number=number, others=(f"tcp://10.0.0.1:{9 + number}",)) for number in (0, 1)]
    assert tier_notices(core) == [ups[0], TierDown(number=0), ups[1]]


@WITH_TIERS
def test_a_tier_process_ends_before_the_next_core_starts(launcher: RemoteLauncher, supervisor: Supervisor) -> None:
    supervisor.start()
    launcher.of(CORE)[0].end()
    started_beside: list[bool] = []
    spawn = launcher.spawn

    def watched_spawn(spec: ProcessSpec) -> RemoteProcess:
        if spec.unit in (CORE, TIER):
            started_beside.append(launcher.of(TIER)[0].is_closed)
        return spawn(spec)

    launcher.spawn = watched_spawn  # type: ignore[method-assign]
    stop_when(launcher, lambda: len(launcher.of(CORE)) == 2 and TierUp(number=1) in launcher.of(CORE)[1].received)
    supervisor.run()
    assert started_beside == [True, True]
    assert tier_notices(launcher.of(CORE)[0]) == [TierUp(number=0)]
    assert tier_notices(launcher.of(CORE)[1]) == [TierUp(number=1)]


@WITH_TIERS
def test_after_too_many_losses_a_tier_process_rests_before_its_next_start(
    launcher: RemoteLauncher, supervisor: Supervisor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "REST_S", 0.4)
    supervisor.start()
    for _ in range(MAX_FAILURES):
        supervisor._roster.policies[TIER].on_failure()
    (tier,), (core,) = launcher.of(TIER), launcher.of(CORE)
    tier.end()
    ended_at = time.monotonic()
    stop_when(launcher, lambda: TierUp(number=1) in core.received)
    supervisor.run()
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert lines == [
        "tier was lost with host-1",
        "the tier process ends again and again: the engine goes on without it and starts it again in 0 s",
    ]
    assert tier_notices(core) == [TierUp(number=0), TierDown(number=0), TierUp(number=1)]
    assert time.monotonic() - ended_at >= 0.4 and not core.has_ended


@pytest.mark.parametrize("launcher", [{"distributed_executor_backend": "ray"}], indirect=True)
def test_a_lost_launcher_is_replaced_alone_and_learns_of_the_places(
    launcher: RemoteLauncher, supervisor: Supervisor
) -> None:
    supervisor.start()
    (first,) = launcher.of(LAUNCHER)
    launcher.places_taken = PlacesTaken(placements=["one"])
    first.send(HostPlaced(placement="one", address="10.0.0.2"))

    def has_next_been_told() -> bool:
        return any(launcher.places_taken in each.received for each in launcher.of(LAUNCHER)[1:])

    def script() -> None:
        if launcher.places_taken in first.received and launcher.news:
            first.end()
            stop_when(launcher, has_next_been_told)

    launcher.script = script
    supervisor.run()
    assert launcher.news == [HostPlaced(placement="one", address="10.0.0.2")]
    assert len(launcher.of(LAUNCHER)) == 2 and supervisor._roster.num_restarts["launcher"] == 1
    assert not any(isinstance(each, ReplicaDown) for each in launcher.of(FRONTEND)[0].received)
    assert [len(launcher.of(unit)) for unit in (WORKERS, CORE, FRONTEND)] == [2, 1, 1]


@pytest.mark.parametrize("launcher", [{}, TIERS | {"enable_prefix_caching": False}], indirect=True)
def test_an_engine_that_uses_no_tiers_has_no_tier_process_and_no_arena(
    launcher: RemoteLauncher, supervisor: Supervisor
) -> None:
    supervisor.start()
    assert launcher.of(TIER) == []
    worker = launcher.of(WORKERS)[0]
    assert list(worker.spec.inherited_fds) == [] and not any("arena" in word for word in worker.spec.arguments)
    assert Initialize(num_blocks=9) in worker.received


@pytest.mark.parametrize("launcher", [{"kv_host_bytes": 4095}], indirect=True)
def test_an_arena_that_cannot_be_made_ends_the_start(launcher: RemoteLauncher, supervisor: Supervisor) -> None:
    with pytest.raises(ConfigError, match="--kv-host-bytes 4095 holds no KV block, which takes 4096 bytes"):
        supervisor.start()


@pytest.mark.parametrize("launcher", [{"tensor_parallel_size": 1, "data_parallel_size": 2}], indirect=True)
def test_a_replica_that_cannot_be_kept_alive_is_taken_off_and_the_engine_ends_with_its_last(
    launcher: RemoteLauncher, supervisor: Supervisor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom.frontend.supervisor.replicas.restart_policy.DELAYS_S", (0.0,) * MAX_FAILURES)
    supervisor.start()
    (frontend,) = launcher.of(FRONTEND)
    units = [Unit("core", 1), CORE]
    names = {process.spec.name for process in launcher.processes}
    assert names == {"worker 0", "core", "worker 0 of replica 1", "core of replica 1", "frontend"}
    identities = {process.spec.identity for process in launcher.processes}
    assert {b"worker-0-of-replica-1-0", b"core-of-replica-1-0", b"core-0"} <= identities

    def end_next_core() -> None:
        for process in launcher.of(units[0]):
            if not process.is_closed and not process.has_ended:
                process.end()
        if any(isinstance(message, ReplicaDown) and message.is_final for message in frontend.received):
            units[0] = CORE

    launcher.script = end_next_core
    with pytest.raises(EngineDead, match="the core cannot be kept alive; last: core was lost with host-1"):
        supervisor.run()
    downs = [message for message in frontend.received if isinstance(message, ReplicaDown)]
    assert [down.replica for down in downs[: MAX_FAILURES + 1]] == [1] * (MAX_FAILURES + 1)
    assert [down for down in downs if down.is_final] == [downs[MAX_FAILURES]]
    assert all(not process.has_ended for process in launcher.of(FRONTEND)[:1])
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    text = "the core of replica 1 cannot be kept alive and its replica is taken off: 1 of 2 go on; last: "
    assert f"{text}core of replica 1 was lost with host-1" in lines


TWO_FRONTENDS = pytest.mark.parametrize("launcher", [{"tensor_parallel_size": 1, "api_server_count": 2}], indirect=True)


def start_all(launcher: RemoteLauncher, supervisor: Supervisor) -> list[RemoteProcess]:
    """Start an engine of two frontends; return them."""

    def finish() -> None:
        frontends = [*launcher.of(FRONTEND), *launcher.of(Unit("frontend", 1))]
        if len(frontends) == 2:
            for frontend in frontends:
                frontend.send(Ready())
            launcher.script = lambda: None

    launcher.script = finish
    supervisor.start()
    return [*launcher.of(FRONTEND), *launcher.of(Unit("frontend", 1))]


@TWO_FRONTENDS
def test_a_lost_frontend_is_replaced_alone_and_drain_waits_for_all(
    launcher: RemoteLauncher, supervisor: Supervisor
) -> None:
    one, other = start_all(launcher, supervisor)
    assert [process.spec.name for process in (one, other)] == ["frontend", "frontend 1"]
    assert [process.spec.identity for process in (one, other)] == [b"frontend-0", b"frontend-1-0"]
    addresses = [next(word for word in each.spec.arguments if "--address" in word) for each in (one, other)]
    assert addresses[0].endswith("client.sock") and addresses[1].endswith("client-1.sock")
    other.end()
    stop_when(launcher, lambda: len(launcher.of(Unit("frontend", 1))) == 2)
    supervisor.run()
    (core,) = launcher.of(CORE)
    assert FrontendDown(identity=b"frontend-1-0") in core.received
    successor = launcher.of(Unit("frontend", 1))[1]
    assert successor.spec.identity == b"frontend-1-1" and not one.has_ended
    assert [word for word in successor.spec.arguments if "--address" in word] == [addresses[1]]
    assert any(isinstance(message, Drain) for message in one.received)
    assert any(isinstance(message, Drain) for message in successor.received)


@TWO_FRONTENDS
def test_a_frontend_that_ends_again_and_again_rests_while_the_others_serve(
    launcher: RemoteLauncher, supervisor: Supervisor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "REST_S", 0.4)
    one, other = start_all(launcher, supervisor)
    for _ in range(MAX_FAILURES):
        supervisor._roster.policies[Unit("frontend", 1)].on_failure()
    (core,) = launcher.of(CORE)
    core.send(Progress(step=1, step_age_s=0.0, num_running=0, num_waiting=0))  # says nothing about the other frontend

    def end_after_the_step() -> None:
        if any(isinstance(each, Progress) and each.step for each in one.received):
            other.end()
            stop_when(launcher, lambda: len(launcher.of(Unit("frontend", 1))) == 2)

    launcher.script = end_after_the_step
    ended_at = time.monotonic()
    supervisor.run()
    assert time.monotonic() - ended_at >= 0.4 and not one.has_ended
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert lines == [
        "frontend 1 was lost with host-1",
        "the frontend 1 ends again and again: the others go on without it, and it is started again in 0 s",
    ]


@TWO_FRONTENDS
@pytest.mark.parametrize("ends_in_drain", [False, True])
def test_a_drain_does_not_wait_for_a_frontend_that_rests(
    launcher: RemoteLauncher, supervisor: Supervisor, ends_in_drain: bool
) -> None:
    one, other = start_all(launcher, supervisor)
    unit = Unit("frontend", 1)
    for _ in range(MAX_FAILURES):
        supervisor._roster.policies[unit].on_failure()

    def end() -> None:
        launcher.script = lambda: None
        other.end()

    def drain() -> None:
        if ends_in_drain or unit in supervisor._roster.resting:
            launcher.script = end if ends_in_drain else lambda: None
            os.kill(os.getpid(), signal.SIGTERM)

    launcher.script = drain
    if not ends_in_drain:
        other.end()
    supervisor.run()
    assert supervisor._drain.is_over, "or --drain-timeout-s has passed"
    assert any(isinstance(each, Drain) for each in one.received) and len(launcher.of(unit)) == 1


@TWO_FRONTENDS
def test_a_frontend_that_has_served_is_started_again_at_once(launcher: RemoteLauncher, supervisor: Supervisor) -> None:
    _, other = start_all(launcher, supervisor)
    unit = Unit("frontend", 1)
    policy = supervisor._roster.policies[unit]
    for _ in range(MAX_FAILURES):
        policy.on_failure()
    other.send(Served())
    ended_at: list[float] = []

    def end_when_read() -> None:
        if policy.on_failure() is not None:  # the report is read, and one failure follows it
            ended_at.append(time.monotonic())
            other.end()
            stop_when(launcher, lambda: len(launcher.of(unit)) == 2)

    launcher.script = end_when_read
    supervisor.run()
    assert time.monotonic() - ended_at[0] < 10


def test_no_number_of_lost_frontends_that_were_ready_ends_the_engine(
    launcher: RemoteLauncher, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "MAX_DELAY_S", 0.01)
    for _ in range(MAX_FAILURES):
        supervisor._roster.policies[FRONTEND].on_failure()
    supervisor.start()

    def end_the_ready() -> None:
        if supervisor._children.is_up(FRONTEND):
            if len(launcher.of(FRONTEND)) > 3 * MAX_FAILURES:
                stop_when(launcher, lambda: True)
            else:
                launcher.of(FRONTEND)[-1].end()

    launcher.script = end_the_ready
    supervisor.run()


@TWO_FRONTENDS
def test_the_engine_ends_with_its_last_frontend_that_can_be_started(
    launcher: RemoteLauncher, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "MAX_DELAY_S", 0.01)
    one, other = start_all(launcher, supervisor)
    for unit in (FRONTEND, Unit("frontend", 1)):
        for _ in range(MAX_FAILURES):
            supervisor._roster.policies[unit].on_failure()
    launcher.refusal = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    one.end()
    other.end()
    with pytest.raises(EngineDead, match="the frontend 1 cannot be kept alive; last: frontend 1 cannot be started"):
        supervisor.run()
