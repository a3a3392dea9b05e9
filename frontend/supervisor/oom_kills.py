"""OomKills: whether it was the kernel, out of memory, that killed a process."""

from __future__ import annotations

from ...ipc.process.machine_memory import MemoryCgroup, gib, memory_cgroups, num_machine_oom_kills, total_bytes

_MEND = "or lower --kv-cache-memory-bytes"


class OomKills:
    """Remembers the kernel's counts of such kills as of the last `look`: only what comes after counts."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cgroups: list[MemoryCgroup] = []
        self._num_kills: list[int | None] = []  # of the process's own cgroup, and of the machine
        self.look()

    def look(self) -> None:
        """To be called now and then while the process lives: it may be moved to another cgroup, and other processes
        may be killed in its own."""
        self._cgroups = memory_cgroups(self._pid) or self._cgroups
        self._num_kills = self._count()

    def _count(self) -> list[int | None]:
        own = next((count for cgroup in self._cgroups if (count := cgroup.num_oom_kills) is not None), None)
        return [own, num_machine_oom_kills()]

    def verdict(self) -> str:
        """Of a process that SIGKILL ended: how the kernel came to kill it, and the mend; empty if it did not."""
        is_same = [before == now for before, now in zip(self._num_kills, self._count(), strict=True) if now is not None]
        if not is_same or any(is_same):
            return ""
        limits = [limit for cgroup in self._cgroups if (limit := cgroup.limit_bytes) is not None]
        if limits and min(limits) < total_bytes():
            return f"the kernel ran out of memory in its cgroup (limit {gib(min(limits))}): raise the limit {_MEND}"
        return f"the kernel ran out of memory ({gib(total_bytes())} on this machine): free some {_MEND}"
