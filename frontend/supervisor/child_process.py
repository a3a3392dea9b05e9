"""ChildProcess: one child of the supervisor, started by exec in a session of its own.

Its standard input is the lifeline that ends it with the supervisor; the last lines of its stderr are kept for errors.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...ipc.process.signals import group_signals_held_back
from .oom_kills import OomKills

NUM_LAST_WORDS = 50
MIN_RUN_S = 1e-3  # below this CPU time a process counts as not scheduled


class ChildProcess:
    """Owns the process, the write end of its lifeline and the read end of its stderr."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        inherited_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.last_words: deque[str] = deque(maxlen=NUM_LAST_WORDS)
        with group_signals_held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],  # -P: a checkout's rooms are no top-level modules
                stdin=subprocess.PIPE,
                stdout=sys.stderr,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=inherited_fds,
                env=environment,
            )
        assert self._process.stderr is not None
        self.stderr_fd = self._process.stderr.fileno()
        os.set_blocking(self.stderr_fd, False)
        self.pid_fd = os.pidfd_open(self._process.pid)
        self._partial = b""
        self._sched_stat = SchedStat.of(self.pid)
        self.oom_kills = OomKills(self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N when signal N ended it."""
        return self._process.poll()

    def resident_bytes(self) -> int:
        """Return the resident memory of the process, 0 if it has ended."""
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0

    def take_starved_s(self) -> float:
        """Return the seconds since the last call in which the main thread waited for a CPU or for the disk."""
        before, self._sched_stat = self._sched_stat, SchedStat.of(self.pid)
        return self._sched_stat.starved_s(before)

    def describe_exit(self) -> str:
        """Describe how the process ended, with its last line of stderr above INFO. It must have ended."""
        code = self.exit_code
        assert code is not None
        if code == -signal.SIGKILL and (reason := self.oom_kills.describe()):
            return f"{self.name} was killed by SIGKILL: {reason}"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        words = next((line for line in reversed(self.last_words) if line.strip() and " INFO " not in line), "")
        return f"{self.name} {how}" + (f": {words.strip()}" if words else "")

    def read_stderr(self) -> list[str]:
        """Return the whole lines written since the last call."""
        try:
            data = os.read(self.stderr_fd, 1 << 16)
        except (BlockingIOError, OSError):
            return []
        *lines, self._partial = (self._partial + data).split(b"\n")
        text = [line.decode(errors="replace") for line in lines]
        self.last_words += text
        return text

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process ends; False after `timeout_s`."""
        ready = select.select([self.pid_fd], [], [], max(timeout_s, 0))[0]
        return bool(ready) and self._process.wait() is not None

    def kill(self) -> None:
        if self.exit_code is None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Kill the process if it still runs, and close all descriptors."""
        self.kill()
        assert self._process.stderr is not None and self._process.stdin is not None
        self._process.stderr.close()
        self._process.stdin.close()
        os.close(self.pid_fd)


class SchedStat(NamedTuple):
    """CPU scheduling of a process's main thread up to now, from /proc."""

    at: float  # monotonic seconds
    state: str  # R: runs or is runnable; D: waits for the disk; S: sleeps; T: stopped; empty: unknown
    ran_s: float
    waited_s: float  # for a CPU; the kernel adds a wait when it ends

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
