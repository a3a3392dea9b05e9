"""Suspend and resume all processes of an engine at once, as `docker pause` does: by the cgroup freezer if this user
may create cgroups, else by SIGSTOP and SIGCONT."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from tokenloom.scripts.bench.processes import signal_all

How = Literal["cgroup", "signals"]
CGROUP_ROOT = Path("/sys/fs/cgroup")
FREEZE_S = 10.0  # longest wait until the kernel has stopped all processes of a cgroup
REMOVE_S = 10.0  # longest wait until a cgroup is empty


class _Freezer(NamedTuple):
    """A cgroup hierarchy with a freezer: the file and values that freeze and thaw, and the line that confirms it."""

    folder: Path
    control: str
    frozen: str
    thawed: str
    state: str
    is_frozen: str


_FREEZERS = (
    _Freezer(CGROUP_ROOT / "freezer", "freezer.state", "FROZEN", "THAWED", "freezer.state", "FROZEN"),
    _Freezer(CGROUP_ROOT, "cgroup.freeze", "1", "0", "cgroup.events", "frozen 1"),
    _Freezer(CGROUP_ROOT / "unified", "cgroup.freeze", "1", "0", "cgroup.events", "frozen 1"),
)


@contextlib.contextmanager
def suspended(processes: Sequence[psutil.Process], how: How) -> Iterator[None]:
    """Suspend all processes inside the `with`; resume them at its end."""
    with _frozen(processes) if how == "cgroup" else _stopped(processes):
        yield


def can_freeze() -> bool:
    """Return whether this user may use a cgroup freezer."""
    with contextlib.suppress(OSError), _new_cgroup():
        return True
    return False


@contextlib.contextmanager
def _stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    signal_all(processes, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_all(processes, signal.SIGCONT)


@contextlib.contextmanager
def _frozen(processes: Sequence[psutil.Process]) -> Iterator[None]:
    with _new_cgroup() as (freezer, cgroup):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                (cgroup / "cgroup.procs").write_text(str(process.pid), encoding="utf-8")
        try:
            deadline = time.monotonic() + FREEZE_S
            while True:  # again and again: one that was about to wait for a child of its own has missed the first
                (cgroup / freezer.control).write_text(freezer.frozen, encoding="utf-8")
                if freezer.is_frozen in (cgroup / freezer.state).read_text(encoding="utf-8"):
                    break
                assert time.monotonic() < deadline, f"{cgroup} does not freeze"
                time.sleep(0.001)
            yield
        finally:
            (cgroup / freezer.control).write_text(freezer.thawed, encoding="utf-8")


@contextlib.contextmanager
def _new_cgroup() -> Iterator[tuple[_Freezer, Path]]:
    """Create an empty cgroup in the first hierarchy with a freezer; raise OSError if there is none."""
    for freezer in _FREEZERS:
        cgroup = freezer.folder / f"tokenloom-freezer-{os.getpid()}"
        try:
            cgroup.mkdir()
        except OSError:
            continue
        try:
            if (cgroup / freezer.control).exists():
                yield freezer, cgroup
                return
        finally:
            _remove(cgroup, freezer.folder)
    raise FileNotFoundError("no cgroup hierarchy has a freezer that this user may use")


def _remove(cgroup: Path, parent: Path) -> None:
    """Remove a cgroup; its processes go to `parent`. Those that have thawed start others in it meanwhile, and one that
    has just ended still counts."""
    deadline = time.monotonic() + REMOVE_S
    while True:
        try:
            cgroup.rmdir()
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        for pid in (cgroup / "cgroup.procs").read_text(encoding="utf-8").split():
            with contextlib.suppress(ProcessLookupError):
                (parent / "cgroup.procs").write_text(pid, encoding="utf-8")
        time.sleep(0.001)
