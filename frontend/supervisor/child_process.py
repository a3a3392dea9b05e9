"""One child of the supervisor: started by exec in its own session, tied to us by a lifeline, its last words kept."""

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
LEAST_RUN_S = 1e-3  # who runs for less has not run


class ChildProcess:
    """Owns the process, its standard input, which is its lifeline, and the read end of its stderr."""

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
        self._schedule = Schedule.of(self.pid)
        self.oom_kills = OomKills(self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N when signal N ended it."""
        return self._process.poll()

    def resident_bytes(self) -> int:
        """Its memory by now; 0 when it has ended."""
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0

    def take_starved_s(self) -> float:
        """For how long its loop has waited for a CPU or for the disk since the last call."""
        before, self._schedule = self._schedule, Schedule.of(self.pid)
        return self._schedule.starved_s(before)

    def describe_exit(self) -> str:
        code = self.exit_code
        assert code is not None
        if code == -signal.SIGKILL and (reason := self.oom_kills.verdict()):
            return f"{self.name} was killed by SIGKILL: {reason}"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        words = next((line for line in reversed(self.last_words) if line.strip() and " INFO " not in line), "")
        return f"{self.name} {how}" + (f": {words.strip()}" if words else "")

    def read_stderr(self) -> list[str]:
        """Whole lines that have come since the last call; b"" at end of file ends the stream."""
        try:
            data = os.read(self.stderr_fd, 1 << 16)
        except (BlockingIOError, OSError):
            return []
        *lines, self._partial = (self._partial + data).split(b"\n")
        text = [line.decode(errors="replace") for line in lines]
        self.last_words += text
        return text

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within `timeout_s`; its stderr is drained meanwhile so that it cannot block on it."""
        ready = select.select([self.pid_fd], [], [], max(timeout_s, 0))[0]
        return bool(ready) and self._process.wait() is not None

    def kill(self) -> None:
        if self.exit_code is None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Kill it if it still runs, and give up all descriptors."""
        self.kill()
        assert self._process.stderr is not None and self._process.stdin is not None
        self._process.stderr.close()
        self._process.stdin.close()
        os.close(self.pid_fd)


class Schedule(NamedTuple):
    """What the first thread of a process has got of the CPUs until now."""

    at: float  # monotonic seconds
    state: str  # R: runs or could; D: waits for the disk; S: sleeps; T: was stopped; empty where nobody tells
    ran_s: float
    waited_s: float  # for a CPU; counted when it gets one

    @classmethod
    def of(cls, pid: int) -> Schedule:
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

    def starved_s(self, before: Schedule) -> float:
        """Since `before`: all of the time if it wants to go on now and has not run at all."""
        if self.state in ("R", "D") and self.ran_s - before.ran_s < LEAST_RUN_S:
            return self.at - before.at
        return max(self.waited_s - before.waited_s, 0.0)
