"""Large blocks are mapped outside the heap, as /proc shows."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

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
