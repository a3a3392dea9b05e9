"""Faults of an engine with hosts that Ray has placed: ranks, agents and their actors, raylets, links, the launcher, and
the head's other processes. The hosts are network namespaces with a raylet in each."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable

import psutil

from tokenloom.ipc.messages.base import LEASE_S
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.chaos.faults import Fault, Faults
from tokenloom.scripts.chaos.link_faults import LinkFaults
from tokenloom.scripts.chaos.losses import Losses
from tokenloom.tests.support.ray_network import RayNetwork

SETTLE_S = 10.0
LONGEST_STOP_S = 8.0
LOCAL_SHARE = 0.25  # of all faults: those of the head's processes but the launcher
BUSY_SHARE = 0.8  # of the faults of another host: one that has a rank
RANK, AGENT, ACTOR, RAYLET = "tokenloom worker", "tokenloom host", "ray::AgentActor", "raylet"


class RayFaults:
    """Draws faults of an engine on Ray."""

    def __init__(self, network: RayNetwork, engine: Engine, local: Faults, losses: Losses, rng: random.Random) -> None:
        """`local` draws faults of the head's processes. The engine serves."""
        self._network, self._engine, self._local, self._losses, self._rng = network, engine, local, losses, rng
        self._draws: list[Callable[[], Fault]] = [
            self._kill_rank,
            lambda: self._stop("a rank", RANK),
            lambda: self._kill("agent", AGENT),
            lambda: self._stop("agent", AGENT),
            self._end_agent,
            lambda: self._kill("actor", ACTOR),
            lambda: self._stop("actor", ACTOR),
            self._kill_raylet,
            lambda: self._stop("raylet", RAYLET),
            lambda: self._signal_launcher("kill", signal.SIGKILL),
            lambda: self._signal_launcher("stop", signal.SIGSTOP),
            *LinkFaults(network, losses, rng).draws,
        ]

    def draw(self) -> Fault:
        """Wait for the mends of the faults before, then draw."""
        self._losses.wait()
        is_local = self._rng.random() < LOCAL_SHARE
        return self._local.draw() if is_local else self._rng.choice(self._draws)()

    def settle(self) -> list[str]:
        """Return the processes of the engine that are left. It has ended, and nothing is to be mended. A socket lives
        no longer than the processes that have it."""
        deadline = time.monotonic() + SETTLE_S
        while (found := [each for number in self._hosts for each in self._left(number)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        return found

    def _left(self, number: int) -> list[str]:
        processes = [*self._network.processes(number, "tokenloom"), *self._network.processes(number, ACTOR)]
        return [f"{process} on {self._network.addresses[number]}" for process in processes]

    @property
    def _hosts(self) -> range:
        return range(len(self._network.addresses))

    def _host(self) -> int:
        """Return a host that is not the head."""
        busy = [number for number in self._hosts[1:] if self._network.ranks(number)]
        return self._rng.choice(busy if busy and self._rng.random() < BUSY_SHARE else self._hosts[1:])

    def _send(self, host: int, title: str, number: signal.Signals) -> psutil.Process | None:
        """Send a signal to one of a host's processes of this title; return it, None if there is none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if found := self._network.processes(host, title):
                process = self._rng.choice(found)
                process.send_signal(number)
                return process
        return None

    def _kill_rank(self) -> Fault:
        host = self._host()
        return Fault("kill a rank on Ray", lambda: self._send(host, RANK, signal.SIGKILL) is not None)

    def _kill(self, name: str, title: str) -> Fault:
        """Return a fault that kills an agent or its actor, and all ranks with it."""
        host = self._host()

        def strike() -> bool:
            children, lost_at = self._network.ranks(host), time.monotonic()
            if self._send(host, title, signal.SIGKILL) is None:
                return False
            self._losses.mend(lambda: self._losses.watch_end(f"{name} of Ray", children, lost_at))
            return True

        return Fault(f"kill {name} on Ray", strike)

    def _end_agent(self) -> Fault:
        """Return a fault that lets an agent end in order."""
        host = self._host()
        return Fault("end agent on Ray", lambda: self._send(host, AGENT, signal.SIGTERM) is not None)

    def _stop(self, name: str, title: str) -> Fault:
        """Return a fault that stops a process; it goes on later unless it has been killed."""
        host, seconds = self._host(), self._rng.uniform(0.5, LONGEST_STOP_S)

        def strike() -> bool:
            if (process := self._send(host, title, signal.SIGSTOP)) is None:
                return False

            def go_on() -> None:
                time.sleep(seconds)
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)

            self._losses.mend(go_on)
            return True

        kind = f"stop {name} on Ray"
        return Fault(f"{kind} past the lease" if seconds > LEASE_S else kind, strike)

    def _kill_raylet(self) -> Fault:
        """Return a fault that kills a node's raylet; the node comes back later."""
        host, pause_s = self._host(), self._rng.uniform(0.0, 2.0)
        is_spare = not self._network.ranks(host)

        def strike() -> bool:
            ranks, lost_at = self._network.ranks(host), time.monotonic()
            if self._send(host, RAYLET, signal.SIGKILL) is None:
                return False

            def again() -> None:
                self._losses.watch_end("their raylet", ranks, lost_at)
                time.sleep(pause_s)
                self._network.end_node(host)
                self._network.start_node(host)
                self._network.wait_nodes(host)

            self._losses.mend(again)
            return True

        return Fault(f"kill raylet{', of a spare node' if is_spare else ''}", strike)

    def _signal_launcher(self, name: str, number: signal.Signals) -> Fault:
        def strike() -> bool:
            launcher = self._engine.find("launcher")
            if launcher is not None:
                launcher.send_signal(number)
            return launcher is not None

        return Fault(f"{name} launcher", strike)
