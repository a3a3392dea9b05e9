"""Faults of an engine over several hosts, which are network namespaces: ranks, agents, links, and the head's processes.

The mends run in the background: a cut link is healed, a stopped agent goes on, a killed one is started again as a
process manager would. The next fault waits for that.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import psutil

from tokenloom.ipc.messages.base import LEASE_S
from tokenloom.scripts.chaos_faults import Fault, Faults
from tokenloom.tests.support.network_hosts import Agent, Network, SpreadEngine

LONGEST_CUT_S = 8.0
ZOMBIE_S = 4.0  # from the loss of a host to the end of its last rank
SETTLE_S = 10.0
STOPPED = (0, -signal.SIGTERM)  # exit codes of a stopped agent; the second if it has only just been started
LOCAL_SHARE = 0.3  # of all faults: those of the head's own processes


class HostFaults:
    """Draws faults; `zombies` lists the processes that lived too long without the head."""

    def __init__(self, network: Network, engine: SpreadEngine, local: Faults, rng: random.Random) -> None:
        """`local` draws faults of the head's processes. The engine serves, and all agents have joined."""
        self._network, self._engine, self._local, self._rng = network, engine, local, rng
        self._agents = {agent.number: agent for agent in network.agents}
        self._pool = ThreadPoolExecutor(len(self._agents) + 1)
        self._mends: list[Future[None]] = []
        self.zombies: list[str] = []
        self.longest_end_s = 0.0  # from a loss to the end of the host's last rank
        self._draws: list[Callable[[], Fault]] = [
            lambda: self._signal_rank("kill", signal.SIGKILL),
            lambda: self._signal_rank("stop", signal.SIGSTOP),
            self._kill_agent,
            self._stop_agent,
            self._restart_agent,
            self._cut_briefly,
            self._cut,
            self._cut_half,
        ]

    def draw(self) -> Fault:
        """Wait for the mends of the faults before, then draw."""
        for mend in self._mends:
            mend.result(60.0)
        self._mends.clear()
        is_local = self._rng.random() < LOCAL_SHARE
        return self._local.draw() if is_local else self._rng.choice(self._draws)()

    def settle(self) -> list[str]:
        """Let everything come back, then stop all agents; return leftovers. The engine has ended."""
        for mend in self._mends:
            mend.result(60.0)
        self._pool.shutdown()
        left: list[str] = []
        for agent in self._agents.values():
            agent.processes()
            agent.signal(signal.SIGTERM)
            code = agent.process.wait(SETTLE_S)
            left += [f"exit code {code} of the agent of {agent.address}"] if code not in STOPPED else []
        for number in range(len(self._network.addresses)):
            left += self._network.listening(number)
        deadline = time.monotonic() + SETTLE_S
        while (found := [each for agent in self._network.agents for each in agent.alive()]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        return left + found + [path for agent in self._agents.values() for path in agent.files()]

    def _agent(self) -> Agent:
        return self._agents[self._rng.choice(list(self._agents))]

    def _mend(self, work: Callable[[], None]) -> None:
        self._mends.append(self._pool.submit(work))

    def _watch_end(self, agent: Agent, processes: list[psutil.Process], lost_at: float) -> None:
        """Note how long the processes of a lost host live."""
        _, alive = psutil.wait_procs(processes, timeout=max(lost_at + ZOMBIE_S - time.monotonic(), 0))
        self.longest_end_s = max(self.longest_end_s, time.monotonic() - lost_at if processes else 0.0)
        self.zombies += [f"{process} of {agent.address} lives {ZOMBIE_S} s after the loss" for process in alive]

    def _signal_rank(self, name: str, number: signal.Signals) -> Fault:
        agent = self._agent()

        def strike() -> bool:
            processes = agent.processes()[1:]
            if not processes:
                return False
            self._rng.choice(processes).send_signal(number)
            return True

        return Fault(f"{name} a process of another host", strike)

    def _kill_agent(self) -> Fault:
        agent, pause_s = self._agent(), self._rng.uniform(0.0, 2.0)

        def strike() -> bool:
            processes, lost_at = agent.processes()[1:], time.monotonic()
            agent.process.kill()

            def again() -> None:
                agent.process.wait()
                self._watch_end(agent, processes, lost_at)
                time.sleep(pause_s)
                self._agents[agent.number] = self._network.join(agent.number)

            self._mend(again)
            return True

        return Fault(f"kill agent{_place(agent)}", strike)

    def _restart_agent(self) -> Fault:
        agent = self._agent()

        def strike() -> bool:
            agent.processes()
            agent.signal(signal.SIGTERM)

            def again() -> None:
                if (code := agent.process.wait(SETTLE_S)) not in STOPPED or agent.alive():
                    self.zombies.append(f"the agent of {agent.address} ended with {code} and left {agent.alive()}")
                self._agents[agent.number] = self._network.join(agent.number)

            self._mend(again)
            return True

        return Fault(f"restart agent{_place(agent)}", strike)

    def _stop_agent(self) -> Fault:
        agent, seconds = self._agent(), self._rng.uniform(0.5, 2 * LEASE_S)

        def strike() -> bool:
            agent.signal(signal.SIGSTOP)

            def go_on() -> None:
                time.sleep(seconds)
                agent.signal(signal.SIGCONT)

            self._mend(go_on)
            return True

        return Fault(f"stop agent{_place(agent)}", strike)

    def _cut_briefly(self) -> Fault:
        return self._cut_links("cut a link for less than the lease", 1, self._rng.uniform(0.3, LEASE_S - 0.5))

    def _cut(self) -> Fault:
        return self._cut_links("cut a link", 1, self._rng.uniform(LEASE_S + 1.5, LONGEST_CUT_S))

    def _cut_half(self) -> Fault:
        num_links = -(-len(self._network.addresses) // 2)
        return self._cut_links("cut half of the links", num_links, self._rng.uniform(0.3, LONGEST_CUT_S))

    def _cut_links(self, kind: str, num_links: int, seconds: float) -> Fault:
        """Return a fault that cuts links at once. A link of the head counts, and makes all others lost."""
        places = [agent.number for agent in self._agents.values() if agent.rank() is not None]
        others = [number for number in range(len(self._network.addresses)) if number not in places]
        self._rng.shuffle(others)
        first = self._rng.choice(places) if places and self._rng.random() < 0.7 else others.pop()
        rest = [number for number in (*places, *others) if number != first]
        numbers = [first, *self._rng.sample(rest, num_links - 1)]
        kind += "" if {0, *places} & {*numbers} else ", of a spare host"

        def strike() -> bool:
            lost = [agent for agent in self._agents.values() if agent.number in numbers or 0 in numbers]
            processes = {agent.number: agent.processes()[1:] for agent in lost}
            cut_at = time.monotonic()
            for number in numbers:
                self._network.cut(number)

            def heal() -> None:
                if seconds > ZOMBIE_S:
                    for agent in lost:
                        self._watch_end(agent, processes[agent.number], cut_at)
                time.sleep(max(cut_at + seconds - time.monotonic(), 0))
                for number in numbers:
                    self._network.heal(number)

            self._mend(heal)
            return True

        return Fault(kind, strike)


def _place(agent: Agent) -> str:
    return "" if agent.rank() is not None else ", of a spare host"
