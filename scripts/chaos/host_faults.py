"""Faults of an engine over several hosts, which are network namespaces: ranks, agents, links and the head itself."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

from tokenloom.ipc.messages.base import LEASE_S
from tokenloom.scripts.chaos.faults import Fault, Faults
from tokenloom.scripts.chaos.link_faults import LinkFaults
from tokenloom.scripts.chaos.losses import Losses
from tokenloom.tests.support.network_hosts import Agent, Network

SETTLE_S = 10.0
STOPPED = (0, -signal.SIGTERM)  # exit codes of a stopped agent; the second if it has only just been started
LOCAL_SHARE = 0.3  # of all faults: those of the head's own processes


class HostFaults:
    """Draws faults of an engine with hosts that were started by hand."""

    def __init__(self, network: Network, local: Faults, losses: Losses, rng: random.Random) -> None:
        """`local` draws faults of the head's processes. The engine serves, and all agents have joined."""
        self._network, self._local, self._losses, self._rng = network, local, losses, rng
        self._agents = {agent.number: agent for agent in network.agents}
        self._draws: list[Callable[[], Fault]] = [
            lambda: self._signal_rank("kill", signal.SIGKILL),
            lambda: self._signal_rank("stop", signal.SIGSTOP),
            self._kill_agent,
            self._stop_agent,
            self._restart_agent,
            *LinkFaults(network, losses, rng).draws,
        ]

    def draw(self) -> Fault:
        """Wait for the mends of the faults before, then draw."""
        self._losses.wait()
        is_local = self._rng.random() < LOCAL_SHARE
        return self._local.draw() if is_local else self._rng.choice(self._draws)()

    def settle(self) -> list[str]:
        """Stop all agents and return leftovers. The engine has ended, and nothing is to be mended."""
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
                self._losses.watch_end("their agent", processes, lost_at)
                time.sleep(pause_s)
                self._agents[agent.number] = self._network.join(agent.number)

            self._losses.mend(again)
            return True

        return Fault(f"kill agent{_place(agent)}", strike)

    def _restart_agent(self) -> Fault:
        agent = self._agent()

        def strike() -> bool:
            agent.processes()
            agent.signal(signal.SIGTERM)

            def again() -> None:
                if (code := agent.process.wait(SETTLE_S)) not in STOPPED or agent.alive():
                    self._losses.zombies.append(f"the agent of {agent.address} ended with {code}, left {agent.alive()}")
                self._agents[agent.number] = self._network.join(agent.number)

            self._losses.mend(again)
            return True

        return Fault(f"restart agent{_place(agent)}", strike)

    def _stop_agent(self) -> Fault:
        agent, seconds = self._agent(), self._rng.uniform(0.5, 2 * LEASE_S)

        def strike() -> bool:
            agent.signal(signal.SIGSTOP)

            def go_on() -> None:
                time.sleep(seconds)
                agent.signal(signal.SIGCONT)

            self._losses.mend(go_on)
            return True

        return Fault(f"stop agent{_place(agent)}", strike)


def _place(agent: Agent) -> str:
    return "" if agent.rank() is not None else ", of a spare host"
