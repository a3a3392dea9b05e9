"""Places: decides which hosts Ray has to place, from the hosts that have a place in the engine and from Ray's reports.

Ray places one host after the other, each on a node of its own, since to the engine a host is a machine. A host is
replaced when Ray reports that it is gone, and also when the head has lost it, which is long before Ray detects a cut
link. The lost one is kept until there are hosts for all places, because its link may recover first. Knows nothing of
Ray.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

logger = logging.getLogger("tokenloom.launcher")

REST_S = 60.0  # time until a node whose agent could not serve is tried again
DELAYS_S = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # delay before the next host after the 1st, 2nd, … failure in a row


class Reservation(Protocol):
    """Resources that Ray keeps for a host."""

    def release(self) -> None:
        """Return the resources to Ray, and end the agent on them."""


@dataclass(eq=False)
class Placement:
    """Host for the engine that Ray is placing or has placed."""

    excluded: frozenset[str]  # nodes on which it must not be
    name: str = field(default_factory=lambda: secrets.token_hex(4))
    reservation: Reservation | None = None
    node: str = ""  # empty: Ray has not placed it yet
    is_taken: bool = False  # whether it has a place in the engine
    is_lost: bool = False  # whether it had a place and lost it


class Places:
    """Owner of the placements. `reserve` lets Ray place a host; the result is reported to `on_placed` or `on_gone`.
    Times are monotonic seconds."""

    def __init__(self, num_places: int, own_node: str, reserve: Callable[[Placement], Reservation]) -> None:
        self._num_places, self._own_node, self._reserve = num_places, own_node, reserve
        self.all: list[Placement] = []
        self._num_by_hand = 0  # number of places with hosts that were started by hand
        self._rests: dict[str, tuple[float, str]] = {}  # by node that is not used: (until when, why)
        self._num_failures, self._next_at = 0, -math.inf

    def on_placed(self, placement: Placement, node: str) -> None:
        placement.node = node

    def on_gone(self, placement: Placement, reason: str, now: float, *, may_retry: bool) -> None:
        """Record that a placed host has ended or could not be placed. `may_retry`: the cause is not the node, which may
        be used again."""
        if placement not in self.all:  # it was released before
            return
        self._num_failures += 1
        self._next_at = now + DELAYS_S[min(self._num_failures, len(DELAYS_S)) - 1]
        if placement.node and not may_retry:
            self._rests[placement.node] = (now + REST_S, reason)
        self._release(placement)

    def on_taken(self, names: Collection[str]) -> None:
        """Record the hosts that have a place in the engine. `names`: for each such host the name of its placement, even
        by a past launcher, or "" if it was started by hand."""
        self._num_by_hand = sum(name == "" for name in names)
        for placement in self.all:
            was_taken, placement.is_taken = placement.is_taken, placement.name in names
            placement.is_lost = (was_taken or placement.is_lost) and not placement.is_taken

    def arrange(self, now: float) -> None:
        """Take the next step towards exactly one host for each place: release hosts that are not needed, or reserve one
        more, unless one is being placed. Must be called again after each report, and at `next_at`."""
        num_taken = sum(placement.is_taken for placement in self.all)
        if num_taken >= self.num_wanted:
            self._num_failures = 0
            for placement in [each for each in self.all if not each.is_taken]:
                self._release(placement)
            return
        self._rests = {node: rest for node, rest in self._rests.items() if rest[0] > now}
        for placement in [each for each in self.all if not each.node and each.excluded != self._excluded(each)]:
            self._release(placement)
        if now < self._next_at or any(not placement.node for placement in self.all):
            return
        if sum(not placement.is_lost for placement in self.all) < self.num_wanted:
            placement = Placement(self._excluded())
            self.all.append(placement)
            placement.reservation = self._reserve(placement)

    def _excluded(self, placement: Placement | None = None) -> frozenset[str]:
        """Return the nodes that have another host than `placement`, or must not have one."""
        others = (each.node for each in self.all if each.node and each is not placement)
        return frozenset(itertools.chain([self._own_node], others, self._rests))

    def _release(self, placement: Placement) -> None:
        self.all.remove(placement)
        if placement.reservation is not None:
            placement.reservation.release()

    @property
    def num_wanted(self) -> int:
        return max(self._num_places - self._num_by_hand, 0)

    @property
    def is_placed(self) -> bool:
        """Whether each place has a host, or a host that is starting."""
        return sum(bool(each.node) and not each.is_lost for each in self.all) >= self.num_wanted

    @property
    def next_at(self) -> float:
        """Latest time at which `arrange` must be called if nothing is reported before; inf if there is nothing to
        do."""
        if sum(placement.is_taken for placement in self.all) >= self.num_wanted:
            return math.inf
        ends = [until for until, _ in self._rests.values()]
        is_waiting = all(placement.node for placement in self.all)
        return min([*ends, *([self._next_at] if is_waiting and not self.is_placed else [])], default=math.inf)

    @property
    def left_out(self) -> dict[str, str]:
        """The nodes that are not used now, each with the reason."""
        return {node: why for node, (_, why) in self._rests.items()}
