"""RemoteProcess: an engine process on another host, with the state that the host's agent reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....ipc.messages.base import LEASE_S
from ....ipc.messages.hosts import ProcessUse
from ..supervisor.launcher import ProcessSpec


class RemoteProcess:
    """ChildProcess whose state comes from messages of its host's agent."""

    wake_fds: Sequence[int] = ()  # messages of the agent wake the supervisor

    def __init__(
        self, spec: ProcessSpec, host: str, wait: Callable[[RemoteProcess, float], None], kill: Callable[[str], None]
    ) -> None:
        """`wait` processes messages until the given process has ended or a number of seconds has passed. `kill` orders
        the end of the process with a key; the end is reported like any other."""
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
        """Order the end of the process if it still runs, and wait for it: until then it may write to slots of the
        arena. If its host never reports the end, the process ends with the loss of the host."""
        if not self.has_ended:
            self._kill(self.key)
        while not self.has_ended:
            self.wait(LEASE_S)
