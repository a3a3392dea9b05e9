"""OomKills: detects that the kernel's OOM killer killed a process."""

from __future__ import annotations

from .machine_memory import MemoryCgroup, gib, memory_cgroups, num_machine_oom_kills, total_bytes

_MEND = "or lower --kv-cache-memory-bytes"


class OomKills:
    """Detector of a process's OOM kill: compares the kernel's counts of OOM kills with those at the last `update`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cgroups: list[MemoryCgroup] = []
        self._num_kills: list[int | None] = []  # in the process's cgroup, and on the machine; None: unknown
        self.update()

    def update(self) -> None:
        """Read the counts. Call it from time to time while the process runs: it may move to another cgroup, and the
        kernel may kill other processes in its cgroup."""
        self._cgroups = memory_cgroups(self._pid) or self._cgroups
        self._num_kills = self._count()

    def _count(self) -> list[int | None]:
        own = next((count for cgroup in self._cgroups if (count := cgroup.num_oom_kills) is not None), None)
        return [own, num_machine_oom_kills()]

    def describe(self) -> str:
        """Return a description of the OOM kill of a process that SIGKILL ended, with the remedy; "" if the counts do
        not show that the OOM killer did it."""
        is_same = [before == now for before, now in zip(self._num_kills, self._count(), strict=True) if now is not None]
        if not is_same or any(is_same):
            return ""
        limits = [limit for cgroup in self._cgroups if (limit := cgroup.limit_bytes) is not None]
        if limits and min(limits) < total_bytes():
            return f"the kernel ran out of memory in its cgroup (limit {gib(min(limits))}): raise the limit {_MEND}"
        return f"the kernel ran out of memory ({gib(total_bytes())} on this machine): free some {_MEND}"
