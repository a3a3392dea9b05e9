"""Faults of the links between hosts, which are network namespaces: cut for a while, one or half of them at once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from tokenloom.ipc.messages.base import LEASE_S
from tokenloom.scripts.chaos.faults import Fault
from tokenloom.scripts.chaos.losses import ZOMBIE_S, Losses
from tokenloom.tests.support.network_hosts import Network

LONGEST_CUT_S = 8.0
BUSY_SHARE = 0.7  # of the cuts: at least one link of a host with ranks


class LinkFaults:
    """Draws cuts. A cut-off host has to end its ranks by itself."""

    def __init__(self, network: Network, losses: Losses, rng: random.Random) -> None:
        self._network, self._losses, self._rng = network, losses, rng
        self.draws: list[Callable[[], Fault]] = [self._cut_briefly, self._cut, self._cut_half]

    def _cut_briefly(self) -> Fault:
        return self._cut_links("cut a link for less than the lease", 1, self._rng.uniform(0.3, LEASE_S - 0.5))

    def _cut(self) -> Fault:
        return self._cut_links("cut a link", 1, self._rng.uniform(LEASE_S + 1.5, LONGEST_CUT_S))

    def _cut_half(self) -> Fault:
        num_links = -(-len(self._network.addresses) // 2)
        return self._cut_links("cut half of the links", num_links, self._rng.uniform(0.3, LONGEST_CUT_S))

    def _cut_links(self, kind: str, num_links: int, seconds: float) -> Fault:
        """Return a fault that cuts links at once. A link of the head counts, and makes all others lost."""
        all_hosts = range(len(self._network.addresses))
        places = [number for number in all_hosts[1:] if self._network.ranks(number)]
        others = [number for number in all_hosts if number not in places]
        self._rng.shuffle(others)
        first = self._rng.choice(places) if places and self._rng.random() < BUSY_SHARE else others.pop()
        rest = [number for number in (*places, *others) if number != first]
        numbers = [first, *self._rng.sample(rest, num_links - 1)]
        kind += "" if {0, *places} & {*numbers} else ", of a spare host"

        def strike() -> bool:
            lost = [number for number in all_hosts[1:] if number in numbers or 0 in numbers]
            processes = [process for number in lost for process in self._network.ranks(number)]
            cut_at = time.monotonic()
            for number in numbers:
                self._network.cut(number)

            def heal() -> None:
                if seconds > ZOMBIE_S:
                    self._losses.watch_end("a link", processes, cut_at)
                time.sleep(max(cut_at + seconds - time.monotonic(), 0))
                for number in numbers:
                    self._network.heal(number)

            self._losses.mend(heal)
            return True

        return Fault(kind, strike)
