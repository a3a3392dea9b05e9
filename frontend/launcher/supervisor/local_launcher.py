"""LocalLauncher: starts processes on this machine, by exec, each in a session of its own.

The standard input of a process is its lifeline, which ends it when the supervisor ends. The last lines of its stderr
are kept for errors. The supervisor waits for processes, kills them and reads /proc only here.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import zmq

from ....ipc.child import spawn_child
from ....ipc.messages.supervisor import HostGone, HostPlaced, PlacesTaken
from ....ipc.process.log import write_line
from ....ipc.process.oom_kills import OomKills
from ....ipc.process.signals import group_signals_held_back
from .launcher import ProcessSpec, Role, Unit

NUM_LAST_WORDS = 50
_FROM_OTHERS = frozenset((-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT))
MIN_RUN_S = 1e-3  # a process with less CPU time counts as not scheduled


class LocalLauncher:
    """Launcher for this machine, with the module that each role runs. As process 1 of a container it also reaps
    orphans."""

    modules: ClassVar[Mapping[Role, str]] = {
        "worker": "tokenloom.workers.process",
        "core": "tokenloom.core.process",
        "frontend": "tokenloom.frontend.server.process",
        "tier": "tokenloom.core.tiers.process",
        "launcher": "tokenloom.frontend.launcher.ray.process",
    }

    wakers: Sequence[zmq.Socket[bytes]] = ()
    next_at = math.inf

    places_taken = PlacesTaken(placements=[])

    def __init__(
        self, environment: Mapping[str, str], write: Callable[[str], None] | None = None, *, is_placed: bool = False
    ) -> None:
        """`write` is called with each line that a process writes to stderr; None: copy it to our stderr. `is_placed`:
        the workers must wait until Ray has reserved devices for them."""
        self._environment, self._write = environment, write or _write_to_stderr
        self._awaits_devices = is_placed
        self._devices: dict[str, str] = {}  # set in the environment of the workers
        self._processes: list[LocalProcess] = []

    def listen(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        control: zmq.Socket[bytes],
        receive_placements: Callable[[], None],
    ) -> None:
        """Do nothing: all processes are on this machine."""

    def obstacle(self, unit: Unit) -> str:
        is_waiting = unit.role == "worker" and self._awaits_devices
        return "devices of this host, which Ray has not reserved yet" if is_waiting else ""

    def on_placement(self, news: HostPlaced | HostGone) -> None:
        """Use the devices that Ray has reserved on this host for the workers that are started from now on."""
        if isinstance(news, HostPlaced) and not news.placement:
            self._awaits_devices = False
            self._devices = {} if news.visible_devices is None else {"CUDA_VISIBLE_DEVICES": news.visible_devices}

    def num_hosts_lost(self, replica: int) -> int:
        return 0

    def spawn(self, spec: ProcessSpec) -> LocalProcess:
        devices = self._devices if spec.unit.role == "worker" else {}
        environment = {**self._environment, **devices}
        process = LocalProcess(spec, self.modules[spec.unit.role], environment, self._write)
        self._processes.append(process)
        return process

    def turn(self) -> None:
        self._processes = [process for process in self._processes if not process.is_closed]
        for process in self._processes:
            process.forward_stderr()
        if os.getpid() == 1:
            self.reap_orphans()

    def close(self) -> None:
        """Do nothing: there is no other machine."""

    def reap_orphans(self) -> None:
        """Reap ended processes that this launcher has not started. As process 1 of a container the supervisor inherits
        the orphans of its children (compilers, the grammar process of a lost core), which otherwise remain as
        zombies."""
        ours = {process.pid for process in self._processes}
        with contextlib.suppress(ChildProcessError):  # there are no children at all
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and found.si_pid not in ours:
                os.waitpid(found.si_pid, 0)


def _write_to_stderr(line: str) -> None:
    write_line(line, sys.stderr)


class LocalProcess:
    """ChildProcess on this machine, with the write end of its lifeline and the read end of its stderr."""

    is_blameless = False

    def __init__(
        self, spec: ProcessSpec, module: str, environment: Mapping[str, str], write: Callable[[str], None]
    ) -> None:
        self._name, self._write, self.is_closed = spec.name, write, False
        self._last_words: deque[str] = deque(maxlen=NUM_LAST_WORDS)
        with group_signals_held_back():
            self._process = spawn_child(
                module, spec.arguments, environment, spec.inherited_fds, stdout=sys.stderr, stderr=subprocess.PIPE
            )
        assert self._process.stderr is not None
        self.pid = self._process.pid
        self._stderr_fd = self._process.stderr.fileno()
        os.set_blocking(self._stderr_fd, False)
        try:
            self._pid_fd = os.pidfd_open(self.pid)
        except OSError:
            self._process.kill()
            self._process.communicate()
            raise
        self.wake_fds: Sequence[int] = (self._stderr_fd, self._pid_fd)
        self.place = f"pid {self.pid}"
        self._partial = b""
        self._sched_stat = SchedStat.of(self.pid)
        self._oom_kills = OomKills(self.pid)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def was_killed(self) -> bool:
        code = self._process.returncode
        return code in _FROM_OTHERS and not (code == -signal.SIGKILL and self._oom_kills.describe())

    def resident_bytes(self) -> int:
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0

    def take_starved_s(self) -> float:
        """Return the seconds since the last call in which the main thread waited for a CPU or for the disk; also update
        the counts of OOM kills for `describe_exit`."""
        self._oom_kills.update()
        before, self._sched_stat = self._sched_stat, SchedStat.of(self.pid)
        return self._sched_stat.starved_s(before)

    def describe_exit(self) -> str:
        """Describe how the process ended: by SIGKILL, and whether by the OOM killer; else the signal or exit code, with
        the last line of stderr that is not INFO."""
        code = self._process.returncode
        if code == -signal.SIGKILL:
            reason = self._oom_kills.describe()
            return f"{self._name} was killed by SIGKILL" + (f": {reason}" if reason else "")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        words = next((line for line in reversed(self._last_words) if line.strip() and " INFO " not in line), "")
        return f"{self._name} {how}" + (f": {words.strip()}" if words else "")

    def forward_stderr(self) -> None:
        """Write the new complete lines of stderr, and keep the last NUM_LAST_WORDS lines."""
        with contextlib.suppress(OSError):  # nothing to read, or closed
            *lines, self._partial = (self._partial + os.read(self._stderr_fd, 1 << 16)).split(b"\n")
            for line in lines:
                self._last_words.append(line.decode(errors="replace"))
                self._write(self._last_words[-1])

    def wait(self, timeout_s: float) -> None:
        select.select([self._pid_fd], [], [], max(timeout_s, 0))

    def close(self) -> None:
        self.is_closed = True
        self._process.kill()  # no effect on an ended process
        self._process.wait()
        assert self._process.stderr is not None and self._process.stdin is not None
        self._process.stderr.close()
        self._process.stdin.close()
        os.close(self._pid_fd)


class SchedStat(NamedTuple):
    """Scheduling of a process's main thread since its start, from /proc."""

    at: float  # monotonic seconds
    state: str  # R: running or runnable; D: waits for the disk; S: sleeps; T: stopped; "": unknown
    ran_s: float
    waited_s: float  # for a CPU; the kernel adds each wait when it ends

    @classmethod
    def of(cls, pid: int) -> SchedStat:
        now = time.monotonic()
        try:
            with (
                open(f"/proc/{pid}/task/{pid}/stat", encoding="utf-8") as stat,
                open(f"/proc/{pid}/schedstat", encoding="utf-8") as schedstat,
            ):
                ran_ns, waited_ns, _ = map(int, schedstat.read().split())
                return cls(now, stat.read().rpartition(") ")[2][0], ran_ns / 1e9, waited_ns / 1e9)
        except (OSError, ValueError):
            return cls(now, "", 0.0, 0.0)

    def starved_s(self, before: SchedStat) -> float:
        """Return the seconds since `before` in which the thread was runnable, or in disk sleep, but not scheduled."""
        if self.state in ("R", "D") and self.ran_s - before.ran_s < MIN_RUN_S:
            return self.at - before.at
        return max(self.waited_s - before.waited_s, 0.0)
