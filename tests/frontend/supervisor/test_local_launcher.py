"""LocalLauncher reaps orphaned processes, and gives workers the devices that Ray reserves."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path
from typing import ClassVar

import pytest

from tokenloom.frontend.supervisor.launcher import CORE, WORKERS, ProcessSpec, Unit
from tokenloom.frontend.supervisor.local_launcher import LocalLauncher
from tokenloom.ipc.messages.supervisor import HostPlaced

DEADLINE_S = 30.0


class BrokenLauncher(LocalLauncher):
    """Its processes end at once, with exit code 1."""

    modules: ClassVar = dict.fromkeys(LocalLauncher.modules, "tokenloom.no_such_module")


def test_orphans_are_reaped_and_children_of_the_engine_keep_their_exit_code() -> None:
    launcher = BrokenLauncher(os.environ)
    orphan, own = subprocess.Popen(["true"]), launcher.spawn(ProcessSpec(Unit("core")))
    try:
        os.waitid(os.P_PID, orphan.pid, os.WEXITED | os.WNOWAIT)
        launcher.reap_orphans()
        own.wait(DEADLINE_S)
        launcher.reap_orphans()
        assert own.has_ended and own.describe_exit().startswith("core exited with code 1")
        launcher.reap_orphans()
        with pytest.raises(ChildProcessError):
            os.waitpid(orphan.pid, os.WNOHANG)
    finally:
        own.close()
        orphan.wait()


def test_descriptors_of_a_closed_process_are_not_read_by_their_next_owner() -> None:
    launcher = BrokenLauncher(os.environ)
    launcher.spawn(ProcessSpec(Unit("core"))).close()
    pipes = [os.pipe() for _ in range(3)]  # they take the numbers that are free now
    for _, write_fd in pipes:
        os.write(write_fd, b"kept\n")
    launcher.turn()
    for read_fd, write_fd in pipes:
        os.close(write_fd)
        with open(read_fd, "rb") as file:
            assert file.read() == b"kept\n"


class PrintingLauncher(LocalLauncher):
    """Its processes print their environment to stderr."""

    modules: ClassVar = dict.fromkeys(LocalLauncher.modules, "tokenloom.tests.support.print_environment")


class TalkingLauncher(LocalLauncher):
    """Its processes print a line to stderr and wait."""

    modules: ClassVar = dict.fromkeys(LocalLauncher.modules, "code")


def test_what_a_killed_process_has_logged_before_is_not_called_the_cause() -> None:
    lines: list[str] = []
    process = TalkingLauncher(os.environ, lines.append).spawn(ProcessSpec(CORE))
    try:
        while not lines:
            assert select.select([process.wake_fds[0]], [], [], DEADLINE_S)[0], "it prints nothing"
            process.forward_stderr()
        os.kill(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)
        assert process.has_ended and process.describe_exit() == "core was killed by SIGKILL"
    finally:
        process.close()


def test_a_process_starts_although_the_folder_of_its_launcher_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    launcher = PrintingLauncher({**os.environ, "CUDA_VISIBLE_DEVICES": ""}, lines.append)
    for folder, removes in ((tmp_path / "kept", False), (tmp_path / "gone", True)):
        folder.mkdir()
        monkeypatch.chdir(folder)
        if removes:
            folder.rmdir()
        process = launcher.spawn(ProcessSpec(CORE))
        process.wait(DEADLINE_S)
        process.forward_stderr()
        process.close()
    assert lines[0::2] == [str(tmp_path / "kept"), "/"]


def test_workers_wait_for_the_devices_that_ray_reserves_and_alone_get_them() -> None:
    lines: list[str] = []
    launcher = PrintingLauncher({**os.environ, "CUDA_VISIBLE_DEVICES": "7"}, lines.append, is_placed=True)
    assert launcher.obstacle(WORKERS) and not launcher.obstacle(CORE)
    launcher.on_placement(HostPlaced(placement="other", address="10.0.0.2"))
    assert launcher.obstacle(WORKERS), "the devices of another host"
    launcher.on_placement(HostPlaced(placement="", address="10.0.0.1", visible_devices="2,3"))
    assert not launcher.obstacle(WORKERS)
    for unit, devices in ((WORKERS, "2,3"), (CORE, "7")):
        process = launcher.spawn(ProcessSpec(unit))
        process.wait(DEADLINE_S)
        process.forward_stderr()
        process.close()
        assert lines.pop() == f"CUDA_VISIBLE_DEVICES={devices}"
