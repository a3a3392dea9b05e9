"""LocalLauncher reaps orphans and gives workers the devices that Ray reserves; Children pass messages on."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from tokenloom.frontend.launcher.supervisor.children import Children
from tokenloom.frontend.launcher.supervisor.launcher import CORE, LAUNCHER, WORKERS, ProcessSpec, Unit, UnstartedProcess
from tokenloom.frontend.launcher.supervisor.local_launcher import LocalLauncher
from tokenloom.ipc.codec import encode
from tokenloom.ipc.messages.supervisor import HostGone, HostPlaced, Phase
from tokenloom.ipc.sockets.zmq_sockets import new_socket
from tokenloom.tests.support.waiting import wait_until

DEADLINE_S = 30.0
ENDS = "tokenloom.no_such_module"  # at once, with exit code 1
PRINTS = "tokenloom.tests.support.print_environment"
WAITS = "code"  # after a line


def test_orphans_are_reaped_and_children_of_the_engine_keep_their_exit_code() -> None:
    launcher = launcher_of(ENDS, os.environ)
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
    launcher = launcher_of(ENDS, os.environ)
    launcher.spawn(ProcessSpec(Unit("core"))).close()
    pipes = [os.pipe() for _ in range(3)]  # they take the numbers that are free now
    for _, write_fd in pipes:
        os.write(write_fd, b"kept\n")
    launcher.turn()
    for read_fd, write_fd in pipes:
        os.close(write_fd)
        with open(read_fd, "rb") as file:
            assert file.read() == b"kept\n"


def launcher_of(module: str, *arguments: Any, **options: Any) -> LocalLauncher:
    """Return a launcher whose processes run this module."""
    launcher = LocalLauncher(*arguments, **options)
    launcher.modules = dict.fromkeys(LocalLauncher.modules, module)  # type: ignore[misc]
    return launcher


def printed(launcher: LocalLauncher, unit: Unit) -> None:
    """Let a process print its environment, and forward that."""
    process = launcher.spawn(ProcessSpec(unit))
    process.wait(DEADLINE_S)
    process.forward_stderr()
    process.close()


def test_what_a_killed_process_has_logged_before_is_not_called_the_cause() -> None:
    lines: list[str] = []
    process = launcher_of(WAITS, os.environ, lines.append).spawn(ProcessSpec(CORE))
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
    launcher = launcher_of(PRINTS, {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, lines.append)
    for name in ("kept", "gone"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        if name == "gone":
            folder.rmdir()
        printed(launcher, CORE)
    assert lines[0::2] == [str(tmp_path / "kept"), "/"]


def test_workers_wait_for_the_devices_that_ray_reserves_and_alone_get_them() -> None:
    lines: list[str] = []
    launcher = launcher_of(PRINTS, {**os.environ, "CUDA_VISIBLE_DEVICES": "7"}, lines.append, is_placed=True)
    assert launcher.obstacle(WORKERS) and not launcher.obstacle(CORE)
    launcher.on_placement(HostPlaced(placement="other", address="10.0.0.2"))
    assert launcher.obstacle(WORKERS), "the devices of another host"
    launcher.on_placement(HostPlaced(placement="", address="10.0.0.1", visible_devices="2,3"))
    assert not launcher.obstacle(WORKERS)
    for unit, devices in ((WORKERS, "2,3"), (CORE, "7")):
        printed(launcher, unit)
        assert lines.pop() == f"CUDA_VISIBLE_DEVICES={devices}"


# ── messages of children ─────────────────────────────────────────────────────────────────────────────────────────────

NUM_MESSAGES = 300
HANDLING_S = 0.001


def handle_slowly() -> None:
    until = time.monotonic() + HANDLING_S
    while time.monotonic() < until:
        pass


def test_a_flood_of_messages_is_taken_in_parts(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/control.sock"
    children, spec = Children(address, launcher_of(ENDS, os.environ, lambda line: None)), ProcessSpec(CORE)
    children.spawn(spec)
    with zmq.Context() as context, new_socket(context, zmq.DEALER, identity=spec.identity) as core:
        core.connect(address)
        for number in range(NUM_MESSAGES):
            core.send(encode(Phase(name=str(number), duration_s=0.0)))
        names, parts, deadline = list[str](), list[int](), time.monotonic() + DEADLINE_S
        while len(names) < NUM_MESSAGES:
            assert time.monotonic() < deadline
            before = len(names)
            for _, message in children.receive():
                assert isinstance(message, Phase)
                names.append(message.name)
                handle_slowly()
            parts.append(len(names) - before)
    children.close(0.0)
    assert names == [str(number) for number in range(NUM_MESSAGES)]
    assert max(parts) < NUM_MESSAGES / 2


class FarLauncher(LocalLauncher):
    """A launcher with processes that end by a report of Ray, as on a host with a killed agent."""

    def listen(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        control: zmq.Socket[bytes],
        receive_placements: Callable[[], None],
    ) -> None:
        self.receive_placements, self.reports = receive_placements, list[HostPlaced | HostGone]()

    def on_placement(self, news: HostPlaced | HostGone) -> None:
        self.reports.append(news)

    def spawn(self, spec: ProcessSpec) -> Any:
        return FarProcess(self)


class FarProcess(UnstartedProcess):
    def __init__(self, launcher: FarLauncher) -> None:
        self._launcher = launcher

    def close(self) -> None:
        wait_until(lambda: self._launcher.receive_placements() or self._launcher.reports)


def test_reports_of_ray_are_applied_while_a_process_is_removed_and_other_messages_kept(tmp_path: Path) -> None:
    launcher, ray, gone = FarLauncher(os.environ), ProcessSpec(LAUNCHER), HostGone(placement="one", reason="killed")
    children = Children(f"ipc://{tmp_path}/control.sock", launcher)
    for spec in (ray, ProcessSpec(WORKERS)):
        children.spawn(spec)
    with zmq.Context() as context, new_socket(context, zmq.DEALER, identity=ray.identity) as peer:
        peer.connect(f"ipc://{tmp_path}/control.sock")
        for message in (Phase(name="joined", duration_s=0.0), gone, Phase(name="placed", duration_s=0.0)):
            peer.send(encode(message))
        children.remove(WORKERS)
        assert launcher.reports == [gone]
        names: list[str] = []
        wait_until(lambda: names.extend(each.name for _, each in children.receive()) or len(names) == 2)
    children.close(0.0)
    assert names == ["joined", "placed"]
