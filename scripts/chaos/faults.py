"""The kinds of faults that the chaos harness inflicts."""

from __future__ import annotations

import contextlib
import random
import secrets
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import zmq

from tokenloom import Client, EngineDead, InternalError, SamplingParams
from tokenloom.ipc.codec import encode, encode_ids
from tokenloom.ipc.messages.base import LEASE_S, PROTOCOL_VERSION, Hello
from tokenloom.ipc.messages.client import Submit
from tokenloom.ipc.process.faults import POINTS
from tokenloom.ipc.spec.config.engine_spec import process_name
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.chaos.clients import Clients
from tokenloom.scripts.chaos.disk_faults import DAMAGES, DiskFaults
from tokenloom.scripts.chaos.engine_freezer import How, can_freeze, suspended
from tokenloom.scripts.chaos.losses import Losses
from tokenloom.tests.support.faults import inject

STRIKE_S = 3.0  # longest wait for a process to pass the point where a fault is injected
TIER_STEADY_S = 31.0  # a tier process that is lost more often than this rests a minute after seven times
RELOAD_S = 60.0  # longest reload, with the replacement of a lost process
# by the requests of these runs
NOT_PASSED = (
    *("worker.load", "worker.reload", "worker.profile", "intake.read", "media.read"),
    *("core.add", "core.admit"),  # of a request with a certain number of tokens
)
OF_ADAPTERS = ("adapter.store", "worker.fill")  # an error there ends requests, so that processes are killed there
OF_TIERS = ("worker.copy blocks", "tier.receive", "tier.load", "tier.store")


@dataclass(frozen=True)
class Fault:
    """A fault. `strike` inflicts it and returns False if it found no target; `client` (any if None) must recover."""

    kind: str
    strike: Callable[[], bool]
    client: int | None = None


class Faults:
    """Draws faults: first a kind, so that all are equally frequent, then its target."""

    def __init__(
        self,
        engine: Engine,
        clients: Clients,
        rng: random.Random,
        losses: Losses,
        num_ranks: int,
        model: Path,
        disk: DiskFaults | None = None,
        adapter: Path | None = None,
        *,
        has_images: bool = False,
        num_replicas: int = 1,
        only_signals: bool = False,
        elsewhere: Callable[[], list[psutil.Process]] = list,
    ) -> None:
        """`model` is the folder of the weights that are served; `disk`: of the tier process, if there is one;
        `adapter`: the folder of an adapter that no request names, if adapters are served; has_images: in requests;
        only_signals: SIGKILL and SIGSTOP, nothing else; `elsewhere` returns the engine's processes on other hosts."""
        self._engine, self._clients, self._rng, self._model = engine, clients, rng, model
        self._losses = losses
        processes = [*(f"worker {rank}" for rank in range(num_ranks)), "core"]
        processes += [process_name(name, replica) for replica in range(1, num_replicas) for name in processes]
        optional = [*(["tier"] if disk else []), *(["media"] if has_images else [])]
        self._lasting = [*processes, "frontend", *optional]
        self._roles = [*self._lasting, "grammar", "prover"]  # these two start when they are needed
        self._num_ranks = num_ranks
        others = (*NOT_PASSED, *OF_ADAPTERS, *(() if disk else OF_TIERS))
        self._points = [point for point in POINTS if point not in others]
        self._freezers: list[How] = ["cgroup", "signals"] if can_freeze() else ["signals"]
        self._draws: list[Callable[[], Fault]] = [
            lambda: self._signal("kill", signal.SIGKILL),
            lambda: self._signal("stop", signal.SIGSTOP),
            self._delay,
            self._freeze,
            lambda: self._raise(self._rng.choice(["error", "memory", "device"])),
            lambda: self._raise("hang"),
            self._start_fails,
            self._lost_in_reload,
            self._socket_delay,
            self._client_reconnects,
            self._client_dies,
            self._stop_supervisor,
        ]
        if adapter is None:  # else their sources are gone, which a start needs
            self._draws.append(lambda: self._kill_supervisor(elsewhere))
        if only_signals:
            self._draws = self._draws[:2]
            return
        if disk is not None:
            self._draws += [lambda: self._damage(disk), lambda: self._fill(disk), self._lose_tier]

        if has_images:
            self._draws.append(self._lost_in_read)
        if adapter is not None:
            self._draws += [self._lost_in_fill, lambda: self._lost_in_load(adapter)]

    def draw(self) -> Fault:
        return self._rng.choice(self._draws)()

    def _signal(self, name: str, number: signal.Signals) -> Fault:
        role = self._rng.choice(self._roles)
        return Fault(f"{name} {_without_rank(role)}", lambda: self._send(role, number))

    def _send(self, role: str, number: signal.Signals) -> bool:
        process = self._engine.find(role)
        if process is None or (role == "tier" and number is not signal.SIGCONT and _is_new(process)):
            return False
        process.send_signal(number)
        return True

    def _delay(self) -> Fault:
        """Return a fault that stops a process for a moment too short to count as a hang."""
        role, seconds = self._rng.choice(self._roles), self._rng.uniform(0.05, 0.5)

        def strike() -> bool:
            if not self._send(role, signal.SIGSTOP):
                return False
            time.sleep(seconds)
            return self._send(role, signal.SIGCONT)

        return Fault(f"delay {_without_rank(role)}", strike)

    def _freeze(self) -> Fault:
        """Return a fault that suspends the whole engine for longer than a step or a heartbeat may take."""
        how, seconds = self._rng.choice(self._freezers), self._rng.uniform(0.5, 5.0)

        def strike() -> bool:
            with suspended(self._engine.processes(), how):
                time.sleep(seconds)
            return True

        return Fault("freeze the engine", strike)

    def _stop_supervisor(self) -> Fault:
        """Return a fault that stops the supervisor, for longer than the leases of hosts or shorter."""
        seconds = self._rng.uniform(0.5, 2 * LEASE_S)

        def strike() -> bool:
            self._engine.signal(signal.SIGSTOP)
            time.sleep(seconds)
            self._engine.signal(signal.SIGCONT)
            return True

        return Fault("stop supervisor", strike)

    def _kill_supervisor(self, elsewhere: Callable[[], list[psutil.Process]]) -> Fault:
        """Return a fault that kills the supervisor, and with it the engine, which is started again."""

        def strike() -> bool:
            processes, lost_at = [*self._engine.processes()[1:], *elsewhere()], time.monotonic()
            self._engine.signal(signal.SIGKILL)
            self._losses.watch_end("their supervisor", processes, lost_at)
            self._engine.start_again()
            return True

        return Fault("kill supervisor", strike)

    def _raise(self, kind: str) -> Fault:
        point = self._rng.choice(self._points)
        rank = self._rng.randrange(self._num_ranks) if point.startswith("worker.") else None
        where = point.partition(".")[0]

        def strike() -> bool:
            is_spared = where == "tier" and ((tier := self._engine.find("tier")) is None or _is_new(tier))
            return not is_spared and self._engine.inject(point, kind, rank, STRIKE_S)

        return Fault(f"{'hang' if kind == 'hang' else 'exception'} in {where}", strike)

    def _damage(self, disk: DiskFaults) -> Fault:
        kind = self._rng.choice(DAMAGES)
        return Fault(f"{kind} blocks on the disk", lambda: disk.damage(kind))

    def _fill(self, disk: DiskFaults) -> Fault:
        """Return a fault that lets the disk be full for a moment."""
        seconds = self._rng.uniform(0.2, 3.0)

        def strike() -> bool:
            with disk.full():
                time.sleep(seconds)
            return True

        return Fault("full disk", strike)

    def _lose_tier(self) -> Fault:
        """Return a fault that kills or stops the tier process, which holds slots at random moments."""
        number = self._rng.choice([signal.SIGKILL, signal.SIGSTOP])
        return Fault(f"{'kill' if number is signal.SIGKILL else 'stop'} tier", lambda: self._send("tier", number))

    def _start_fails(self) -> Fault:
        """Return a fault that kills a worker and lets its replacement fail while it loads."""
        rank = self._rng.randrange(self._num_ranks)

        def strike() -> bool:
            return self._send(f"worker {rank}", signal.SIGKILL) and self._engine.inject(
                "worker.load", "error", rank, 10 * STRIKE_S
            )

        return Fault("exception in a worker's start", strike)

    def _lost_in_reload(self) -> Fault:
        """Return a fault that reloads the served weights and kills a process while a rank begins to read them."""
        role, rank = self._rng.choice(self._lasting), self._rng.randrange(self._num_ranks)

        def strike() -> bool:
            inject(self._engine.faults, "worker.reload", "delay 0.2", rank)
            with Client(self._engine.address, reconnect_timeout_s=RELOAD_S) as client, ThreadPoolExecutor(1) as pool:
                reload = pool.submit(client.reload, self._model)
                has_struck = self._engine.wait_struck("worker.reload", rank, STRIKE_S)
                has_killed = has_struck and self._send(role, signal.SIGKILL)
                # A rank was lost, so that the old weights stay; or the core of an earlier fault is not back yet.
                with contextlib.suppress(InternalError, EngineDead):
                    reload.result(RELOAD_S)
            return has_killed

        return Fault(f"{_without_rank(role)} killed in a reload", strike)

    def _lost_in_read(self) -> Fault:
        """Return a fault that kills a process while an image is decoded."""
        role = self._rng.choice(self._lasting)

        def strike() -> bool:
            return self._engine.inject("media.read", "delay 0.2", None, STRIKE_S) and self._send(role, signal.SIGKILL)

        return Fault(f"{_without_rank(role)} killed while an image is read", strike)

    def _lost_in_fill(self) -> Fault:
        """Return a fault that kills a process while a rank fills a slot with an adapter."""
        role, rank = self._rng.choice(self._lasting), self._rng.randrange(self._num_ranks)

        def strike() -> bool:
            return self._engine.inject("worker.fill", "delay 0.2", rank, STRIKE_S) and self._send(role, signal.SIGKILL)

        return Fault(f"{_without_rank(role)} killed in a fill", strike)

    def _lost_in_load(self, adapter: Path) -> Fault:
        """Return a fault that kills a process while an adapter is loaded under a new name, which is unloaded then."""
        role, name = self._rng.choice(self._lasting), f"new-{self._rng.randrange(1 << 30)}"

        def strike() -> bool:
            inject(self._engine.faults, "adapter.store", "delay 0.2")
            with Client(self._engine.address, reconnect_timeout_s=RELOAD_S) as client, ThreadPoolExecutor(1) as pool:
                load = pool.submit(client.load_adapter, name, adapter)
                has_struck = self._engine.wait_struck("adapter.store", None, STRIKE_S)
                has_killed = has_struck and self._send(role, signal.SIGKILL)
                load.result(RELOAD_S)
                client.unload_adapter(name)
            return has_killed

        return Fault(f"{_without_rank(role)} killed in a load of an adapter", strike)

    def _socket_delay(self) -> Fault:
        """Return a fault that delays a client's traffic, within the client's lease or past it."""
        client = self._rng.randrange(self._clients.num)
        is_long = self._rng.random() < 0.3
        seconds = LEASE_S * 1.5 if is_long else self._rng.uniform(0.05, 1.0)

        def strike() -> bool:
            self._clients.hold(client, seconds)
            return True

        return Fault("socket delayed past the lease" if is_long else "socket delayed", strike, client)

    def _client_reconnects(self) -> Fault:
        client = self._rng.randrange(self._clients.num)

        def strike() -> bool:
            self._clients.cut(client)
            return True

        return Fault("socket cut, client reconnects", strike, client)

    def _client_dies(self) -> Fault:
        return Fault("client dies", self._submit_and_vanish)

    def _submit_and_vanish(self) -> bool:
        """Submit from a new client that closes its socket without a goodbye."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, secrets.token_bytes(16))
        socket.connect(self._engine.address)
        socket.send(encode(Hello(protocol_version=PROTOCOL_VERSION)))
        params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True, n=2)
        socket.send(encode(Submit(request_id="lost", params=params, prompt_token_ids=encode_ids([5, 6, 7]))))
        socket.poll(1000)
        context.destroy(linger=0)
        return True


def _is_new(process: psutil.Process) -> bool:
    """Whether the process started so lately that its loss counts as one of a row."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return time.time() - process.create_time() < TIER_STEADY_S
    return True


def _without_rank(role: str) -> str:
    return role.partition(" ")[0]
