"""Workers: the state of the core's worker group, from the opening of its sockets to its end.

    absent ──▶ listening ──▶ probing ──▶ serving
      ▲            └────────────┴───────────┤
      └─────────────────────────────────────┘

Ranks may connect from `listening` on. They are probed once the core has an engine, and serve when all have replied.
No method waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import zmq

from ...ipc.errors import EngineDead
from ...ipc.messages.workers import ReloadWeights
from ...ipc.spec.config.engine_config import EngineConfig
from ..hang_detector import FIRST_LIMIT_S
from .worker_group import PROBE_INTERVAL_S, WorkerGroup

State = Literal["absent", "listening", "probing", "serving"]
_MOVES: dict[State, set[State]] = {
    "absent": {"listening"},
    "listening": {"probing", "absent"},
    "probing": {"serving", "absent"},
    "serving": {"absent"},
}


class Workers:
    """Owner of the worker group. `serving`: the group if steps may be sent to it, else None. Invariant: there is a
    group unless the state is absent."""

    def __init__(self, open_group: Callable[[int], WorkerGroup], config: EngineConfig) -> None:
        self._open_group = open_group
        self._probe_timeout_s = config.step_timeout_s or FIRST_LIMIT_S  # ranks may still run a step of an earlier core
        self._order_timeout_s = config.start_timeout_s
        self._state: State = "absent"
        self._group: WorkerGroup | None = None
        self.serving: WorkerGroup | None = None
        self._probing_since = 0.0  # monotonic seconds

    def _move(self, state: State) -> None:
        assert state in _MOVES[self._state], f"workers cannot go from {self._state} to {state}"
        self._state = state

    @property
    def wakers(self) -> list[zmq.Socket[bytes]]:
        """The sockets to poll; empty if the group is absent or must not be read yet."""
        if self._group is None or self._state == "listening":
            return []
        return [self._group.results]

    @property
    def wait_s(self) -> float | None:
        """Longest time until `go_on_joining` must be called, in seconds; None: no limit."""
        if self._state == "probing":
            return PROBE_INTERVAL_S
        return None

    def listen(self, generation: int) -> WorkerGroup:
        """Open the sockets of a new group, after closing those of the present one, and return the group."""
        self.close()
        self._move("listening")
        self._group = self._open_group(generation)
        return self._group

    def probe(self) -> None:
        """Start to probe the ranks."""
        assert self._group is not None
        self._move("probing")
        self._probing_since = time.monotonic()
        self._group.begin_probe(self._probe_timeout_s)

    def go_on_joining(self) -> WorkerGroup | None:
        """Continue to probe the ranks. Return the group, once, when all of them have replied; else None. EngineDead if
        the time limit is exceeded."""
        if self._group is None or self._state != "probing" or not self._group.go_on_probing():
            return None
        self._move("serving")
        self.serving = self._group
        return self._group

    @property
    def probing_s(self) -> float:
        """The time since `probe` was called, in seconds."""
        return time.monotonic() - self._probing_since

    def check_order(self, now: float) -> None:
        """Raise EngineDead if ranks take longer than --start-timeout-s for an order. `now`: time on the group's
        AwakeClock."""
        if (group := self.serving) is None or group.order_overdue_at is None or now <= group.order_overdue_at:
            return
        what = "other weights were not read" if isinstance(group.order, ReloadWeights) else "a profile was not made"
        raise EngineDead(f"the workers hang: {what} within --start-timeout-s {self._order_timeout_s:g} s")

    @property
    def generation(self) -> int | None:
        """The generation number of the group; None if there is no group."""
        if self._group is None:
            return None
        return self._group.generation

    def close(self) -> None:
        """Close the sockets to the group, which is lost or replaced."""
        if self._group is not None:
            self._group.close()
            self._group = self.serving = None
            self._move("absent")
