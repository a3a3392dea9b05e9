"""RemoteProcess: a process of ours on another host, as its agent reports it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....ipc.messages.base import LEASE_S
from ....ipc.messages.hosts import ProcessUse
from ..supervisor.launcher import ProcessSpec


class RemoteProcess:
    """A ChildProcess with the state that messages of its agent give."""

    wake_fds: Sequence[int] = ()  # messages of the agent wake the supervisor

    def __init__(
        self, spec: ProcessSpec, host: str, wait: Callable[[RemoteProcess, float], None], kill: Callable[[str], None]
    ) -> None:
        """`wait` takes messages until the process has ended or the seconds are over; `kill` orders its end, which is
        reported as any other."""
        self.key = spec.identity.decode()
        self._name, self._host, self._wait, self._kill = spec.name, host, wait, kill
        self.place = f"host {host}"
        self._end: str | None = None
        self.is_blameless = self.was_killed = False
        self._use = ProcessUse(self.key, 0.0, 0)

    def on_spawned(self, pid: int) -> None:
        self.place = f"pid {pid} on host {self._host}"

    def on_use(self, use: ProcessUse) -> None:
        self._use = ProcessUse(self.key, self._use.starved_s + use.starved_s, use.resident_bytes)

    def on_ended(self, how: str) -> None:
        self._end = f"{how} (on host {self._host})"

    def on_host_lost(self, reason: str) -> None:
        self._end = f"{self._name} is lost with host {self._host}: {reason}"
        self.is_blameless = True

    @property
    def has_ended(self) -> bool:
        return self._end is not None

    def describe_exit(self) -> str:
        return self._end or ""

    def resident_bytes(self) -> int:
        return 0 if self.has_ended else self._use.resident_bytes

    def take_starved_s(self) -> float:
        starved_s, self._use = self._use.starved_s, ProcessUse(self.key, 0.0, self._use.resident_bytes)
        return starved_s

    def wait(self, timeout_s: float) -> None:
        self._wait(self, timeout_s)

    def close(self) -> None:
        """Order its end, if it still runs, and wait for it: until then it may write slots of the arena. A host that
        does not reap it is lost with it."""
        if not self.has_ended:
            self._kill(self.key)
        while not self.has_ended:
            self.wait(LEASE_S)
