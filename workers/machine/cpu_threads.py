"""The number of compute threads of a worker: the cores of this process, divided among the ranks of this machine.

Imported before torch, because the OpenMP runtime reads its environment once.
"""

from __future__ import annotations

import math
import os
from pathlib import Path


def num_cpu_threads(configured: int | None, local_ranks: int) -> int:
    """Return `configured`; if it is None, this rank's share, at least 1, of the physical cores on which this process
    may run, or of its cgroup's CPUs if these are fewer."""
    if configured is not None:
        return configured
    cores = min(num_physical_cores(os.sched_getaffinity(0)), int(min(cgroup_cpus(), 1 << 20)))
    return max(cores // local_ranks, 1)


def prepare_openmp(num_threads: int) -> None:
    """Set the environment of the OpenMP runtime, before torch is imported.

    Waiting threads sleep instead of spinning, unless OMP_WAIT_POLICY is set: on busy cores a spinning thread uses up
    its time slice while the thread that it waits for is not scheduled. With spinning, a step of a small model takes 250
    ms on two busy cores, not 4.
    """
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def num_physical_cores(cpus: set[int], sysfs: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the number of distinct physical cores of the logical `cpus`: threads of one core share its vector units.
    If `sysfs` has no topology, return the number of `cpus`."""
    cores = set()
    for cpu in cpus:
        topology = sysfs / f"cpu{cpu}" / "topology"
        try:
            names = ("physical_package_id", "core_id")
            cores.add(tuple((topology / name).read_text(encoding="utf-8") for name in names))
        except OSError:  # some sandboxes have no such files: count each CPU
            return len(cpus)
    return len(cores)


def cgroup_cpus(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the CPU seconds per second that this container may use, at least 1; infinity if there is no limit."""
    try:
        quota, period = (root / "cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return _cgroup_v1_cpus(root / "cpu")
    return math.inf if quota == "max" else max(int(quota) / int(period), 1.0)


def _cgroup_v1_cpus(folder: Path) -> float:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
        period = int((folder / "cpu.cfs_period_us").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return math.inf
    return math.inf if quota <= 0 else max(quota / period, 1.0)
