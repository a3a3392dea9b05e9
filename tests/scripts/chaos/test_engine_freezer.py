"""The freezer gives all processes back, also those that start while it thaws, and leaves no cgroup behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tokenloom.scripts.chaos.engine_freezer import CGROUP_ROOT, can_freeze, suspended

NUM_SUSPENSIONS = 20
FAMILY = """
import subprocess
ended = subprocess.Popen(["true"])  # a zombie: nobody waits for it
print("runs", flush=True)
while True:
    for child in [subprocess.Popen(["sh", "-c", "true; true"]) for _ in range(4)]:
        child.wait()
"""

pytestmark = pytest.mark.skipif(not can_freeze(), reason="this user may not make cgroups")


@pytest.fixture
def family() -> Iterator[psutil.Process]:
    """A process that starts others without a pause."""
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"runs\n"
        yield psutil.Process(process.pid)
        process.kill()


def test_processes_that_start_while_it_thaws_are_given_back_too(family: psutil.Process) -> None:
    for _ in range(NUM_SUSPENSIONS):
        with suspended([family, *family.children(recursive=True)], "cgroup"):
            pass
    assert family.is_running()
    assert not list(CGROUP_ROOT.glob("*/tokenloom-freezer-*"))
