"""An engine started by the command, as an operator would, and what the operating system says of it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import psutil

START_S = 60.0
STOP_S = 20.0


class LaunchedEngine:
    """`engine-launch` with arguments; a context manager that kills whatever is left and demands that nothing is."""

    def __init__(self, runtime: Path, *arguments: str) -> None:
        self.runtime = runtime
        command = [
            sys.executable,
            "-m",
            "tokenloom.frontend.launch",
            "--num-threads",
            "1",
            "--device",
            "cpu",
            *arguments,
        ]
        environment = os.environ | {"XDG_RUNTIME_DIR": str(runtime)}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/", env=environment, text=True
        )
        self.lines: list[str] = []
        self._pending = b""
        self.known: list[psutil.Process] = []

    def wait_ready(self) -> str:
        """The address on the line that begins with Ready."""
        line = self.wait_line("Ready")
        self.known = [psutil.Process(self.process.pid), *self.children()]
        return next(word for word in line.split() if "://" in word)

    def wait_http(self) -> str:
        """The URL of its HTTP server, on the same line."""
        self.wait_ready()
        return next(word for word in self.lines[-1].split() if word.startswith("http://"))

    def wait_line(self, beginning: str) -> str:
        assert self.process.stdout is not None
        deadline = time.monotonic() + START_S
        while (line := self._next_line(deadline)) is not None:
            self.lines.append(line)
            if line.startswith(beginning):
                return line
        raise AssertionError(f"no line begins with {beginning}: {self.lines} {self.output()}")

    def _next_line(self, deadline: float) -> str | None:
        """The next line of stdout, past Python's own buffer, of which select knows nothing; None: no more comes."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while b"\n" not in self._pending:
            if not select.select([fd], [], [], max(deadline - time.monotonic(), 0))[0]:
                return None
            data = os.read(fd, 1 << 16)
            if not data:
                return None
            self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        return line.decode()

    def output(self) -> str:
        """stderr to its end; only for an engine that has ended or is being given up."""
        self.process.kill()
        return self.process.communicate(timeout=STOP_S)[1]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def child(self, role: str) -> psutil.Process:
        """The process whose title is `tokenloom ROLE`."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for process in self.children():
                if _title(process) == f"tokenloom {role}":
                    self.known.append(process)
                    return process
            time.sleep(0.01)
        raise AssertionError(f"no process is called tokenloom {role}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_exit(self, timeout_s: float = STOP_S) -> int:
        return self.process.wait(timeout_s)

    def check_nothing_is_left(self, within_s: float = 3.0) -> None:
        """No process, no file in the runtime directory but the lock of the base."""
        deadline = time.monotonic() + within_s
        while True:
            alive = [process for process in self.known if _is_alive(process)]
            files = [path for path in (self.runtime / "tokenloom").rglob("*") if path.name != ".lock"]
            if not alive and not files:
                return
            assert time.monotonic() < deadline, f"left behind: {alive} {files}"
            time.sleep(0.02)

    def __enter__(self) -> LaunchedEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        _, errors = self.process.communicate(timeout=STOP_S)
        (self.runtime / "stderr").write_text(errors)  # for whoever looks for the cause of a failure
        self.check_nothing_is_left()


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:  # it has just ended
        return ""


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
