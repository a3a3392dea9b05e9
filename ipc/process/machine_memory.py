"""Memory of this machine and of a process's cgroups (v1 and v2), read from /proc and /sys."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMINFO, VMSTAT = Path("/proc/meminfo"), Path("/proc/vmstat")
_NO_LIMIT_BYTES = 1 << 62  # cgroup v1 shows "no limit" as a number near 2^63


class MemoryCgroup(NamedTuple):
    """A cgroup with a memory controller. A property is None if the kernel does not provide it."""

    folder: Path
    is_v1: bool

    @property
    def limit_bytes(self) -> int | None:
        """The memory limit; None if there is no limit."""
        limit = _read_number(self.folder / ("memory.limit_in_bytes" if self.is_v1 else "memory.max"))
        return None if limit is None or limit >= _NO_LIMIT_BYTES else limit

    @property
    def headroom_bytes(self) -> int | None:
        """Limit − usage + file cache that the kernel can reclaim; None without a limit."""
        usage = _read_number(self.folder / ("memory.usage_in_bytes" if self.is_v1 else "memory.current"))
        limit, statistics = self.limit_bytes, _read_table(self.folder / "memory.stat")
        if limit is None or usage is None:
            return None
        reclaimable = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
        return max(limit - usage + reclaimable, 0)

    @property
    def num_oom_kills(self) -> int | None:
        """Number of the cgroup's processes that the OOM killer has killed."""
        return _read_count(self.folder / ("memory.oom_control" if self.is_v1 else "memory.events"), "oom_kill")


def memory_cgroups(pid: int | None = None, root: Path = CGROUP_ROOT) -> list[MemoryCgroup]:
    """Return the memory cgroups of a process (None: this one), innermost first; empty if unknown."""
    try:
        membership = Path(f"/proc/{'self' if pid is None else pid}/cgroup").read_text(encoding="utf-8")
    except OSError:
        return []
    return list(_memory_cgroups(membership, root))


@functools.lru_cache(maxsize=64)  # a health monitor asks every few seconds
def _memory_cgroups(membership: str, root: Path) -> tuple[MemoryCgroup, ...]:
    found: list[MemoryCgroup] = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            base = root / controllers
            folder = base / path.lstrip("/")
            folders = [folder, *(parent for parent in folder.parents if parent.is_relative_to(base))]
            found += [MemoryCgroup(each, is_v1=bool(controllers)) for each in folders]
    return tuple(found)


def available_bytes(root: Path = CGROUP_ROOT) -> int:
    """Return the bytes that this process may still allocate: the minimum over the machine and its cgroups."""
    headrooms = [cgroup.headroom_bytes for cgroup in memory_cgroups(root=root)]
    return min([_meminfo_bytes("MemAvailable:"), *(each for each in headrooms if each is not None)])


def total_bytes() -> int:
    """Return the size of the machine's memory in bytes."""
    return _meminfo_bytes("MemTotal:")


def swap_bytes() -> int:
    """Return the machine's free swap space in bytes."""
    return _meminfo_bytes("SwapFree:")


def num_machine_oom_kills() -> int | None:
    """Return the number of processes that the OOM killer has killed on this machine, in any cgroup; None if unknown."""
    return _read_count(VMSTAT, "oom_kill")


def gib(num_bytes: int) -> str:
    """Format a size in GiB, or in MiB below 128 MiB."""
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 27 else f"{num_bytes / (1 << 20):.1f} MiB"


def _meminfo_bytes(name: str) -> int:
    return _read_table(MEMINFO)[name] << 10


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # "max"
        return None


def _read_count(path: Path, name: str) -> int | None:
    """Return the number in the line «NAME NUMBER» of a file, None if there is none; cheaper than `_read_table` if a
    file has many lines."""
    try:
        found = re.search(rf"^{name} (\d+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def _read_table(path: Path) -> dict[str, int]:
    """Return the numbers of a file by name, from its lines that start with a name and a number; empty if it cannot be
    read."""
    try:
        words = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in words if len(line) >= 2 and line[1].isdecimal()}
