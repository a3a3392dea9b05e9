"""One child of the supervisor: started by exec in its own session, tied to us by a lifeline, its last words kept."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence

NUM_LAST_WORDS = 50


class ChildProcess:
    """Owns the process, the write end of its lifeline and the read end of its stderr."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.last_words: deque[str] = deque(maxlen=NUM_LAST_WORDS)
        read_fd, self._lifeline_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--lifeline-fd", str(read_fd)],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                stderr=subprocess.PIPE,
                pass_fds=[read_fd],
                start_new_session=True,
                env=environment,
                cwd="/",  # `-m` puts the working folder on sys.path: our room folders must not be found there
            )
        finally:
            os.close(read_fd)
        assert self._process.stderr is not None
        self.stderr_fd = self._process.stderr.fileno()
        os.set_blocking(self.stderr_fd, False)
        self.pid_fd = os.pidfd_open(self._process.pid)
        self._partial = b""
        self._starved_s = 0.0

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
        """For how long its loop has waited for a CPU since the last call."""
        before, self._starved_s = self._starved_s, starved_s(self.pid)
        return max(self._starved_s - before, 0.0)

    def describe_exit(self) -> str:
        code = self.exit_code
        assert code is not None
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
        assert self._process.stderr is not None
        self._process.stderr.close()
        os.close(self.pid_fd)
        os.close(self._lifeline_fd)


def starved_s(pid: int) -> float:
    """For how long the first thread of a process has been ready to run without a CPU; 0 where nobody tells."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
