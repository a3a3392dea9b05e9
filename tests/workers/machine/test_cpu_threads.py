"""Ranks share the physical cores that this process may use; an operator's number stands."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from tokenloom.workers.machine.cpu_threads import cgroup_cpus, num_cpu_threads, num_physical_cores


def write_topology(sysfs: Path, cores: list[tuple[int, int]]) -> None:
    for cpu, (package, core) in enumerate(cores):
        folder = sysfs / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")


def test_two_threads_of_a_core_count_once(tmp_path: Path) -> None:
    write_topology(tmp_path, [(0, 0), (0, 1), (1, 0), (0, 0), (0, 1), (1, 0)])
    assert num_physical_cores({0, 1, 2, 3, 4, 5}, tmp_path) == 3
    assert num_physical_cores({0, 3}, tmp_path) == 1
    assert num_physical_cores({0, 9}, tmp_path) == 2, "without a topology each counts"


@pytest.mark.parametrize(("text", "cpus"), [("max 100000", math.inf), ("250000 100000", 2.5), ("20000 100000", 1.0)])
def test_a_cgroup_quota_limits_the_threads(text: str, cpus: float, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert cgroup_cpus(tmp_path) == cpus


def test_a_cgroup_v1_quota_limits_the_threads(tmp_path: Path) -> None:
    folder = tmp_path / "cpu"
    folder.mkdir()
    (folder / "cpu.cfs_quota_us").write_text("150000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_cpus(tmp_path) == 1.5
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert cgroup_cpus(tmp_path) == math.inf


def test_ranks_share_the_cores_and_each_gets_at_least_one() -> None:
    available = num_cpu_threads(None, 1)
    assert 1 <= available <= len(os.sched_getaffinity(0))
    assert num_cpu_threads(None, 1000) == 1
    assert num_cpu_threads(7, 1000) == 7
