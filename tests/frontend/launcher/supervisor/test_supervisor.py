"""The supervisor replaces what is lost, starts nothing too often, and ends with a reason."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

import pytest

from tokenloom.frontend.launcher.supervisor.launcher import CORE, FRONTEND, LAUNCHER, TIER, WORKERS, ProcessSpec, Unit
from tokenloom.frontend.launcher.supervisor.replicas.restart_policy import MAX_FAILURES
from tokenloom.ipc.errors import ConfigError, EngineDead, error_info
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.base import Ping, Rank
from tokenloom.ipc.messages.supervisor import (
    ArenaLost,
    Drain,
    Failed,
    FrontendDown,
    HostPlaced,
    Initialize,
    Listening,
    Meeting,
    PlacesTaken,
    Progress,
    ReplicaDown,
    Served,
    TierDown,
    TierUp,
    WorkersDown,
    WorkersUp,
)
from tokenloom.ipc.process.arena import ArenaShape
from tokenloom.tests.frontend.launcher.supervisor.conftest import HANG_TIMEOUT_S
from tokenloom.tests.frontend.launcher.supervisor.remote_engine import RemoteEngine, RemoteProcess

TWO_HOSTS = {"hosts": 2, "listen_hosts": "tcp://10.0.0.9:7100", "hosts_key_file": "hosts.key"}
TIERS = {"kv_host_bytes": 1 << 20, "kv_disk": "/nowhere"}
SECOND = Unit("frontend", 1)
REST_S = 0.4


def of(*options: dict[str, object]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("engine", options, indirect=True)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_a_lost_remote_worker_replaces_its_group_and_the_others_stay(
    engine: RemoteEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.start()
    places = " and ".join([*engine.supervisor.addresses, *engine.supervisor._listeners.addresses])
    assert "http://" in places and "unix:" in places
    engine.processes[1].end()
    with caplog.at_level("INFO", logger="tokenloom"):
        engine.run_until(lambda: WorkersUp(generation=1) in engine.core.received)
    started = [(process.spec.unit, process.spec.number, process.spec.rank) for process in engine.processes]
    old, new = ([(WORKERS, generation, Rank(0, rank)) for rank in (0, 1)] for generation in (0, 1))
    assert started == [*old, (CORE, 0, None), (FRONTEND, 0, None), *new]
    assert WorkersDown(generation=0, reason="worker 1 was lost with host-1") in engine.core.received
    assert any(line.startswith(f"state: serving at {places}, up") for line in caplog.messages)
    assert "state: worker 1: pid 7 on host-1, ready, generation 1, 5 MiB" in caplog.messages


# ── start ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_process_that_cannot_be_started_is_tried_again(engine: RemoteEngine) -> None:
    engine.start()
    engine.refusal = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    engine.core.end()

    def relent() -> bool:
        if engine.num_refused == 2:
            engine.refusal = None
        return len(engine.of(CORE)) == 2

    engine.run_until(relent)
    remedy = "raise the limit of processes (ulimit -u, pids.max of the cgroup)"
    failure = f"core cannot be started: Resource temporarily unavailable: {remedy}"
    assert engine.frontends[0].progress.last_failure == failure


def test_a_process_that_cannot_be_started_at_the_engines_start_ends_it_with_the_remedy(engine: RemoteEngine) -> None:
    engine.refusal, engine.script = OSError(errno.EMFILE, "Too many open files"), lambda: None
    with pytest.raises(EngineDead, match=r"worker 0 cannot be started: Too many open files: .*ulimit -n"):
        engine.start()


def test_a_remote_process_that_ends_during_the_start_ends_the_engine(engine: RemoteEngine) -> None:
    engine.script = lambda: engine.core.end()
    with pytest.raises(EngineDead, match="core was lost with host-1"):
        engine.start()


def test_the_reason_of_a_failed_start_counts_even_if_it_arrives_after_the_end_of_its_process(
    engine: RemoteEngine,
) -> None:
    def fail() -> None:
        (frontend,) = engine.frontends
        frontend.end()
        failed = Failed(error=error_info(ConfigError("port 1 is taken")))
        threading.Timer(0.2, frontend.send, [failed]).start()
        engine.script = lambda: None

    engine.script = fail
    with pytest.raises(ConfigError, match="port 1 is taken"):
        engine.start()


def test_a_core_that_was_ready_long_before_the_frontend_does_not_count_as_hung(engine: RemoteEngine) -> None:
    begun = time.monotonic()

    def finish_late() -> None:
        if time.monotonic() > begun + 2 * HANG_TIMEOUT_S:
            engine.finish_start()

    engine.script = finish_late
    engine.start()
    engine.run_until(lambda: Ping() in engine.core.received)
    assert [process.spec.number for process in engine.processes] == [0, 0, 0, 0]


def test_workers_start_when_what_they_wait_for_is_there(engine: RemoteEngine) -> None:
    engine.obstacles[WORKERS] = "1 more host of 2"

    def come() -> None:
        assert [process.spec.unit for process in engine.processes] == [CORE, FRONTEND]
        engine.obstacles.clear()
        engine.script = engine.finish_start

    engine.script = come
    engine.start()
    assert len(engine.workers) == 2


@pytest.mark.parametrize(
    "message",
    [
        Meeting(generation=0, address="tcp://10.0.0.1:9"),
        Listening(generation=0, steps="tcp://10.0.0.1:7", results="tcp://10.0.0.1:8"),
    ],
)
def test_a_rank_that_connects_late_learns_where_the_others_are(
    engine: RemoteEngine, message: Meeting | Listening
) -> None:
    engine.start()
    (engine.workers[0] if isinstance(message, Meeting) else engine.core).send(message)

    def is_done() -> bool:
        last = engine.workers[-1]
        if message in last.received and last.spec.number == 0:
            last.end()
        return message in last.received and last.spec.number == 1

    engine.run_until(is_done)


def test_a_process_that_is_lost_with_its_host_is_no_failure_and_the_frontends_learn_what_is_missing(
    engine: RemoteEngine,
) -> None:
    engine.start()
    (frontend,) = engine.frontends
    seen: list[str] = []

    def lose_the_host() -> bool:
        process = engine.workers[-1]
        if process.spec.number <= MAX_FAILURES and not process.has_ended:
            engine.obstacles[WORKERS] = "1 more host of 2"
            process.is_blameless = True
            process.end()
        elif engine.obstacles:
            seen.extend(each.obstacle for each in frontend.received if isinstance(each, Progress))
            engine.obstacles.clear()
        return process.spec.number > MAX_FAILURES

    engine.run_until(lose_the_host)
    assert "1 more host of 2" in seen and frontend.progress.num_restarts == MAX_FAILURES + 1


# ── the tier process, and the launcher on Ray ────────────────────────────────────────────────────────────────────────


@of(TIERS)
def test_workers_and_tier_process_inherit_one_arena_that_outlives_them(
    engine: RemoteEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.start()
    engine.tier.end()
    engine.workers[0].end()
    with caplog.at_level("INFO", logger="tokenloom"):
        engine.run_until(lambda: {WorkersUp(generation=1), TierUp(number=1)} <= set(engine.core.received))
    users = [*engine.workers, *engine.of(TIER)]
    assert len(users) == 4 + 2
    ((fd,),) = {tuple(process.spec.inherited_fds) for process in users}
    assert os.fstat(fd).st_size == 256 * 4096  # a slot takes a page
    assert all(f"--arena-fd={fd}" in process.spec.arguments for process in users)
    assert [process.spec.arguments[0] for process in engine.of(TIER)] == ["--number=0", "--number=1"]
    sizes = Initialize(pool=PoolShape(9, 1, (1,)), arena=ArenaShape(256, (1,), (2,)))  # a byte of each rank
    assert all(sizes in process.received for process in (*users, engine.core))
    assert "state: tier: pid 7 on host-1, ready, number 1, 5 MiB" in caplog.messages
    engine.supervisor.stop()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@of(TIERS)
def test_the_core_learns_of_a_lost_tier_process_after_its_end_and_of_the_arena_lost_with_it(
    engine: RemoteEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.start()
    tier, core = engine.tier, engine.core
    tier.answers_pings = False
    engine.num_lost = 1
    is_reaped: list[bool] = []

    def is_done() -> bool:
        if TierDown(number=0) in core.received:
            is_reaped.append(tier.is_closed)
        return TierUp(number=1) in core.received

    engine.run_until(is_done)
    assert any("tier hangs: no sign of life" in line for line in caplog.messages)
    assert is_reaped and all(is_reaped)
    notices = [each for each in core.received if isinstance(each, (TierUp, TierDown, ArenaLost))]
    assert notices == [TierUp(number=0), ArenaLost(arena=1), TierDown(number=0), TierUp(number=1)]
    assert [process.spec.number for process in engine.processes] == [0, 0, 0, 0, 0, 1]


@of(TIERS | TWO_HOSTS)
def test_each_host_has_a_tier_process_and_all_are_replaced_together(engine: RemoteEngine) -> None:
    engine.start()
    engine.of(TIER)[1].end()
    ups = [TierUp(number=number, others=(f"tcp://10.0.0.1:{9 + number}",)) for number in (0, 1)]
    engine.run_until(lambda: ups[1] in engine.core.received)
    started = [(process.spec.host, process.spec.number) for process in engine.of(TIER)]
    assert started == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert all(bool(process.spec.inherited_fds) == (process.spec.host == 0) for process in engine.of(TIER))
    assert engine.core.tier_notices == [ups[0], TierDown(number=0), ups[1]]


@of(TIERS)
def test_a_tier_process_ends_before_the_next_core_starts_which_begins_with_the_arena_of_then(
    engine: RemoteEngine,
) -> None:
    engine.start()
    engine.num_lost = 2
    engine.core.end()
    (tier,), spawn, started_beside = engine.of(TIER), engine.spawn, list[bool]()

    def watched_spawn(spec: ProcessSpec) -> RemoteProcess:
        started_beside.append(tier.is_closed)
        return spawn(spec)

    engine.spawn = watched_spawn  # type: ignore[method-assign]
    engine.run_until(lambda: TierUp(number=1) in engine.core.received)
    assert started_beside == [True, True]
    assert [core.tier_notices for core in engine.of(CORE)] == [[TierUp(number=number)] for number in (0, 1)]
    arguments = [list(core.spec.arguments) for core in engine.of(CORE)]
    assert [words[words.index("--arena") + 1] for words in arguments] == ["0", "2"]


@of(TIERS)
def test_after_too_many_losses_a_tier_process_rests_before_its_next_start(
    engine: RemoteEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.supervisor.losses.rest_s = REST_S
    engine.start()
    engine.wear_out(TIER)
    engine.tier.end()
    ended_at = time.monotonic()
    engine.run_until(lambda: TierUp(number=1) in engine.core.received)
    assert errors(caplog) == [
        "tier was lost with host-1",
        "the tier process ends again and again: the engine goes on without it and starts it again in 0 s",
    ]
    assert engine.core.tier_notices == [TierUp(number=0), TierDown(number=0), TierUp(number=1)]
    assert time.monotonic() - ended_at >= REST_S and not engine.core.has_ended


@of({"distributed_executor_backend": "ray"})
def test_a_lost_launcher_is_replaced_alone_and_learns_of_the_places(engine: RemoteEngine) -> None:
    engine.start()
    (first,) = engine.of(LAUNCHER)
    engine.places_taken = PlacesTaken(placements=["one"])
    first.send(HostPlaced(placement="one", address="10.0.0.2"))

    def has_next_been_told() -> bool:
        if engine.places_taken in first.received and engine.news:
            first.end()
        return any(engine.places_taken in each.received for each in engine.of(LAUNCHER)[1:])

    engine.run_until(has_next_been_told)
    assert engine.news == [HostPlaced(placement="one", address="10.0.0.2")]
    assert engine.supervisor._roster.num_restarts["launcher"] == 1
    assert not engine.frontends[0].has(ReplicaDown)
    assert [len(engine.of(unit)) for unit in (LAUNCHER, WORKERS, CORE, FRONTEND)] == [2, 2, 1, 1]


@of({}, TIERS | {"enable_prefix_caching": False})
def test_an_engine_that_uses_no_tiers_has_no_tier_process_and_no_arena(engine: RemoteEngine) -> None:
    engine.start()
    assert engine.of(TIER) == []
    worker = engine.workers[0]
    assert list(worker.spec.inherited_fds) == [] and not any("arena" in word for word in worker.spec.arguments)
    assert Initialize(pool=PoolShape(9, 1, (1,))) in worker.received


@of({"kv_host_bytes": 4095})
def test_an_arena_that_cannot_be_made_ends_the_start(engine: RemoteEngine) -> None:
    with pytest.raises(ConfigError, match="--kv-host-bytes 4095 holds no KV block, which takes 4096 bytes"):
        engine.start()


# ── several replicas and frontends ───────────────────────────────────────────────────────────────────────────────────


@of({"tensor_parallel_size": 1, "data_parallel_size": 2})
def test_a_replica_that_cannot_be_kept_alive_is_taken_off_and_the_engine_ends_with_its_last(
    engine: RemoteEngine, caplog: pytest.LogCaptureFixture
) -> None:
    for policy in engine.policies.values():
        policy.delays_s = (0.0,) * MAX_FAILURES
    engine.start()
    (frontend,) = engine.frontends
    names = {process.spec.name for process in engine.processes}
    assert names == {"worker 0", "core", "worker 0 of replica 1", "core of replica 1", "frontend"}
    identities = {process.spec.identity for process in engine.processes}
    assert {b"worker-0-of-replica-1-0", b"core-of-replica-1-0", b"core-0"} <= identities

    def finals() -> list[ReplicaDown]:
        return [each for each in frontend.received if isinstance(each, ReplicaDown) and each.is_final]

    def end_next_core() -> None:
        for process in engine.of(CORE if finals() else Unit("core", 1)):
            process.end()

    engine.script = end_next_core
    with pytest.raises(EngineDead, match="the core cannot be kept alive; last: core was lost with host-1"):
        engine.supervisor.run()
    downs = [message for message in frontend.received if isinstance(message, ReplicaDown)]
    assert [down.replica for down in downs[: MAX_FAILURES + 1]] == [1] * (MAX_FAILURES + 1)
    assert finals() == [downs[MAX_FAILURES]] and not frontend.has_ended
    text = "the core of replica 1 cannot be kept alive and its replica is taken off: 1 of 2 go on; last: "
    assert f"{text}core of replica 1 was lost with host-1" in errors(caplog)


TWO_FRONTENDS = of({"tensor_parallel_size": 1, "api_server_count": 2})


@TWO_FRONTENDS
def test_a_lost_frontend_is_replaced_alone_and_drain_waits_for_all(engine: RemoteEngine) -> None:
    engine.start()
    one, other = engine.frontends
    assert [process.spec.name for process in (one, other)] == ["frontend", "frontend 1"]
    assert [process.spec.identity for process in (one, other)] == [b"frontend-0", b"frontend-1-0"]
    other.end()
    engine.run_until(lambda: len(engine.of(SECOND)) == 2)
    assert FrontendDown(identity=b"frontend-1-0") in engine.core.received
    successor = engine.frontends[2]
    assert successor.spec.identity == b"frontend-1-1" and not one.has_ended
    places = [[word for word in each.spec.arguments if "--address" in word] for each in engine.frontends]
    assert [words[0].rpartition("/")[2] for words in places] == ["client.sock", "client-1.sock", "client-1.sock"]
    assert one.has(Drain) and successor.has(Drain)


@TWO_FRONTENDS
def test_a_frontend_that_ends_again_and_again_rests_while_the_others_serve(
    engine: RemoteEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.supervisor.losses.rest_s = REST_S
    engine.start()
    one, other = engine.frontends
    engine.wear_out(SECOND)
    engine.core.send(Progress(step=1, step_age_s=0.0, num_running=0, num_waiting=0))  # of the other frontend's work

    def end_after_the_step() -> bool:
        if any(isinstance(each, Progress) and each.step for each in one.received):
            other.end()
        return len(engine.of(SECOND)) == 2

    ended_at = time.monotonic()
    engine.run_until(end_after_the_step)
    assert time.monotonic() - ended_at >= REST_S and not one.has_ended
    assert errors(caplog) == [
        "frontend 1 was lost with host-1",
        "the frontend 1 ends again and again: the others go on without it, and it is started again in 0 s",
    ]


@TWO_FRONTENDS
@pytest.mark.parametrize("ends_in_drain", [False, True])
def test_a_drain_does_not_wait_for_a_frontend_that_rests(engine: RemoteEngine, ends_in_drain: bool) -> None:
    engine.start()
    one, other = engine.frontends
    engine.wear_out(SECOND)

    def drain() -> None:
        if ends_in_drain or SECOND in engine.supervisor._roster.resting:
            engine.script = other.end if ends_in_drain else lambda: None
            os.kill(os.getpid(), signal.SIGTERM)

    engine.script = drain
    if not ends_in_drain:
        other.end()
    engine.supervisor.run()
    assert engine.supervisor._drain.is_over, "or --drain-timeout-s has passed"
    assert one.has(Drain) and len(engine.of(SECOND)) == 1


@TWO_FRONTENDS
def test_a_frontend_that_has_served_is_started_again_at_once(engine: RemoteEngine) -> None:
    engine.start()
    engine.wear_out(SECOND)
    engine.frontends[1].send(Served())

    def end_when_read() -> bool:
        if engine.policies[SECOND].on_failure() is not None:  # the report is read, and one failure follows it
            engine.frontends[1].end()
            engine.stop_when(lambda: len(engine.of(SECOND)) == 2)
        return False

    engine.run_until(end_when_read)


def test_no_number_of_lost_frontends_that_were_ready_ends_the_engine(engine: RemoteEngine) -> None:
    engine.supervisor.losses.max_delay_s = 0.01
    engine.wear_out(FRONTEND)
    engine.start()

    def end_the_ready() -> bool:
        if engine.supervisor._children.is_up(FRONTEND):
            engine.frontends[-1].end()
        return len(engine.frontends) > 3 * MAX_FAILURES

    engine.run_until(end_the_ready)


@TWO_FRONTENDS
def test_the_engine_ends_with_its_last_frontend_that_can_be_started(engine: RemoteEngine) -> None:
    engine.supervisor.losses.max_delay_s = 0.01
    engine.start()
    engine.wear_out(FRONTEND, SECOND)
    engine.refusal = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    for frontend in engine.frontends:
        frontend.end()
    with pytest.raises(EngineDead, match="the frontend 1 cannot be kept alive; last: frontend 1 cannot be started"):
        engine.supervisor.run()
