"""Memory of the machine and of cgroups of both versions; large blocks are mapped outside the heap, as /proc shows."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tokenloom.ipc.process.machine_memory import MemoryCgroup, available_bytes, memory_cgroups, total_bytes

MIB = 1 << 20


def test_available_memory_is_the_minimum_of_machine_and_cgroups(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) <= psutil.virtual_memory().total
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            break
    else:
        pytest.skip("this machine has no cgroup v2")
    folder = tmp_path / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{64 * MIB}\n")
    (folder / "memory.current").write_text(f"{50 * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 123\ninactive_file {10 * MIB}\n")
    assert available_bytes(tmp_path) == 24 * MIB


def test_the_machines_memory_equals_psutils() -> None:
    assert total_bytes() == psutil.virtual_memory().total


@pytest.mark.parametrize("is_v1", [False, True])
def test_limit_and_kills_are_read_in_both_cgroup_versions(tmp_path: Path, is_v1: bool) -> None:
    cgroup = MemoryCgroup(tmp_path, is_v1)
    assert (cgroup.limit_bytes, cgroup.headroom_bytes, cgroup.num_oom_kills) == (None, None, None)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
    (tmp_path / names[0]).write_text(f"{(1 << 63) - 4096}\n" if is_v1 else "max\n")
    assert cgroup.limit_bytes is None
    (tmp_path / names[0]).write_text(f"{64 * MIB}\n")
    (tmp_path / names[1]).write_text(f"{60 * MIB}\n")
    (tmp_path / ("memory.oom_control" if is_v1 else "memory.events")).write_text("oom_kill_disable 0\noom_kill 3\n")
    assert (cgroup.limit_bytes, cgroup.headroom_bytes, cgroup.num_oom_kills) == (64 * MIB, 4 * MIB, 3)


def test_a_process_belongs_to_its_cgroup_and_all_parents() -> None:
    for inner, outer in zip(memory_cgroups(), memory_cgroups()[1:], strict=False):
        assert inner.is_v1 != outer.is_v1 or inner.folder.is_relative_to(outer.folder)


HEAP_AFTER_A_LARGE_BLOCK_WAS_FREED = """
import sys
from tokenloom.ipc.process.malloc import return_large_blocks

def heap_bytes():
    (line,) = (line for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]"))
    begin, end = line.split()[0].split("-")
    return int(end, 16) - int(begin, 16)

if sys.argv[1] == "returned":
    return_large_blocks()
before = heap_bytes()
block = bytearray(8 << 20)
del block
block = bytearray(8 << 20)
print(heap_bytes() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
@pytest.mark.parametrize("kind, is_from_heap", [("returned", False), ("kept", True)])
def test_a_large_block_is_returned_and_the_next_is_not_on_the_heap(kind: str, is_from_heap: bool) -> None:
    command = [sys.executable, "-P", "-c", HEAP_AFTER_A_LARGE_BLOCK_WAS_FREED, kind]
    grown = int(subprocess.check_output(command, timeout=30.0, cwd="/"))
    assert (grown > 4 << 20) == is_from_heap, grown  # some of it was there before
