"""How many threads a worker computes with: the physical cores that it may use, shared by the ranks of this machine.

Imported before torch, whose OpenMP runtime reads OMP_NUM_THREADS once.
"""

from __future__ import annotations

import math
import os
from pathlib import Path


def num_cpu_threads(configured: int | None, local_ranks: int) -> int:
    """The operator's number, or this rank's share of the cores; at least 1."""
    if configured is not None:
        return configured
    cores = min(num_physical_cores(os.sched_getaffinity(0)), int(min(cgroup_cpus(), 1 << 20)))
    return max(cores // local_ranks, 1)


def num_physical_cores(cpus: set[int], sysfs: Path = Path("/sys/devices/system/cpu")) -> int:
    """Distinct cores among logical `cpus`: two threads of one core share its vector units."""
    cores = set()
    for cpu in cpus:
        topology = sysfs / f"cpu{cpu}" / "topology"
        try:
            cores.add(((topology / "physical_package_id").read_text(), (topology / "core_id").read_text()))
        except OSError:  # no such files in some sandboxes: each counts
            return len(cpus)
    return len(cores)


def cgroup_cpus(root: Path = Path("/sys/fs/cgroup")) -> float:
    """CPU seconds per second that this container may use, at least 1; infinity without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return _cgroup_v1_cpus(root / "cpu")
    return math.inf if quota == "max" else max(int(quota) / int(period), 1.0)


def _cgroup_v1_cpus(folder: Path) -> float:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return math.inf
    return math.inf if quota <= 0 else max(quota / period, 1.0)
