"""Processes killed by the kernel for lack of memory, in a cgroup of this test."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom import Client, SamplingParams
from tokenloom.ipc.process.oom_kills import OomKills
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.waiting import Deadline
from tokenloom.tests.system.launched import wait_health

LIMIT_BYTES = 16 << 20
LOOK_S = 1.0  # how often the supervisor checks its children's cgroups
DEADLINE_S = 30.0
HOG = "import sys; sys.stdin.read(1); bytearray(b'x' * (256 << 20)); sys.stdin.read()"


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Create a cgroup of v1 or v2 that counts memory and has no limit yet."""
    for root in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        folder = root / f"tokenloom-oom-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            if _limit_file(folder).exists():
                break
            folder.rmdir()
    else:
        pytest.skip("this user may not make memory cgroups")
    yield folder
    for pid in (folder / "cgroup.procs").read_text().split():
        (folder.parent / "cgroup.procs").write_text(pid)
    folder.rmdir()


def _limit_file(folder: Path) -> Path:
    v1 = folder / "memory.limit_in_bytes"
    return v1 if v1.exists() else folder / "memory.max"


def _usage_file(folder: Path) -> Path:
    v1 = folder / "memory.usage_in_bytes"
    return v1 if v1.exists() else folder / "memory.current"


@contextlib.contextmanager
def hog(cgroup: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in the cgroup that allocates memory when it reads a byte."""
    with subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE) as process:
        (cgroup / "cgroup.procs").write_text(str(process.pid))
        try:
            yield process
        finally:
            process.kill()


def grow(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    process.stdin.write(b"x")
    process.stdin.flush()
    return process.wait(DEADLINE_S)


def test_an_oom_kill_is_reported_with_the_limit_and_the_remedy(cgroup: Path) -> None:
    with hog(cgroup) as process:
        kills = OomKills(process.pid)
        _limit_file(cgroup).write_text(str(LIMIT_BYTES))
        assert grow(process) == -signal.SIGKILL
        assert kills.describe() == (
            "the kernel ran out of memory in its cgroup (limit 16.0 MiB): raise the limit or lower "
            "--kv-cache-memory-bytes"
        )


def test_a_kill_by_another_process_is_not_reported_as_an_oom_kill(cgroup: Path) -> None:
    with hog(cgroup) as process:
        kills = OomKills(process.pid)
        with hog(cgroup) as other:
            _limit_file(cgroup).write_text(str(LIMIT_BYTES))
            assert grow(other) == -signal.SIGKILL
        kills.update()
        process.kill()
        assert process.wait(DEADLINE_S) == -signal.SIGKILL and kills.describe() == ""


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_health_names_the_memory_limit_after_an_oom_kill_of_a_worker(cgroup: Path, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--num-threads", "1", "--hang-timeout-s", str(3 * LOOK_S)]
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with Engine(tmp_path, options) as engine:
        with Client(engine.wait_ready()) as client:
            (cgroup / "cgroup.procs").write_text(str(engine.child("worker 0").pid))
            looks = Deadline(2 * LOOK_S)
            while not looks.has_passed():
                client.generate("Yes", params, use_tqdm=False)
            _limit_file(cgroup).write_text(str(int(_usage_file(cgroup).read_text()) + (4 << 20)))
            answers = client.generate([[5] * 1500] * 8, params, use_tqdm=False)
            assert all(len(answer.outputs[0].token_ids) == 200 for answer in answers)
            killed = "worker 0 was killed by SIGKILL: the kernel ran out of memory in its cgroup"
            failure = wait_health(client, 1).last_failure
            assert re.match(killed + r" \(limit \d+\.\d MiB\): raise", failure), failure
        assert engine.stop() == 0
