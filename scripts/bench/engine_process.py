"""An engine started by its command: its output, its processes, injected faults and leftovers."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, TypeVar

import psutil

from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.waiting import Deadline, wait_until

EngineT = TypeVar("EngineT", bound="Engine")

START_S = 60.0
STOP_S = 60.0


class Engine:
    """Owner of the engine's process, which it kills at the end of a `with`.

    A thread reads stdout and a file takes stderr, so that no full pipe blocks the engine. Once the engine is ready,
    `addresses` are for clients, one of each frontend; `address` is the first of them, and `url` that of --http. Limits
    are seconds of a `Deadline`: a busy machine does not shorten them. `program` is the module that is run.
    """

    program: ClassVar = "tokenloom.frontend.launch"

    def __init__(
        self,
        runtime: Path,
        arguments: Sequence[str],
        more: Mapping[str, str] | None = None,
        *,
        has_faults: bool = True,
        prefix: Sequence[str] = (),
    ) -> None:
        """Start the engine; `more` is added to the environment; `has_faults` enables `inject`; `prefix` is a program
        that executes the command in its own place."""
        self.runtime, self.faults, self.errors = runtime, runtime / "faults", runtime / "stderr"
        self.faults.mkdir(exist_ok=True)
        self._command = [*prefix, sys.executable, "-m", self.program, *arguments]
        self._environment = os.environ | {"XDG_RUNTIME_DIR": str(runtime)} | dict(more or {})
        if has_faults:
            self._environment["TOKENLOOM_FAULTS"] = str(self.faults)
        self.lines: list[str] = []  # of stdout
        self.address = self.url = ""
        self.addresses: list[str] = []
        self._seen: dict[int, psutil.Process] = {}
        self._start()

    def _start(self) -> None:
        with self.errors.open("a", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd="/",
                env=self._environment,
                encoding="utf-8",
            )
        self._unheard: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # for wait_line; None: end of stdout
        self._reader = threading.Thread(target=self._read, args=(self.process, self._unheard), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str], unheard: queue.SimpleQueue[str | None]) -> None:
        assert process.stdout is not None
        with process.stdout as stdout:
            for line in stdout:
                self.lines.append(line.rstrip("\n"))
                unheard.put(self.lines[-1])
        unheard.put(None)

    def start_again(self, timeout_s: float = START_S) -> None:
        """Wait for the end of the engine, start it again, and wait until it is ready."""
        self.wait_exit(timeout_s)
        self._start()
        self.wait_ready(timeout_s)

    def wait_line(self, beginning: str, timeout_s: float = START_S) -> str:
        """Wait for the next line of stdout that starts with `beginning`; return it. AssertionError at the timeout."""
        deadline, line = Deadline(timeout_s), ""
        while line is not None and not deadline.has_passed():
            with contextlib.suppress(queue.Empty):
                line = self._unheard.get(timeout=deadline.left_s())
                if line is not None and line.startswith(beginning):
                    return line
        raise AssertionError(
            f"no line begins with {beginning}: {self.lines}\n{self.errors.read_text(encoding='utf-8')}"
        )

    def wait_ready(self, timeout_s: float = START_S) -> str:
        """Wait for the ready line, set `address` and `url` from it, and return the clients' address."""
        places = [word for word in self.wait_line("Ready", timeout_s).split() if "://" in word]
        self.addresses = [place for place in places if not place.startswith("http")]
        self.address, self.url = self.addresses[0], "".join(place for place in places if place.startswith("http"))
        self.processes()
        return self.address

    def processes(self) -> list[psutil.Process]:
        """Return the supervisor and its descendants, and note them: `leftovers` reports those that are still alive."""
        supervisor = psutil.Process(self.process.pid)
        found = [supervisor, *supervisor.children(recursive=True)]
        self._seen |= {process.pid: process for process in found}
        return found

    def find(self, role: str) -> psutil.Process | None:
        """Return the engine's process titled `tokenloom ROLE`; None if there is none, as during a replacement."""
        return next((process for process in self.processes() if _title(process) == f"tokenloom {role}"), None)

    def child(self, role: str) -> psutil.Process:
        """Wait until there is a process titled `tokenloom ROLE` and return it."""
        process = wait_until(lambda: self.find(role), f"no process is called tokenloom {role}", START_S)
        assert process is not None
        return process

    def inject(self, point: str, kind: str, rank: int | None, timeout_s: float) -> bool:
        """Request a fault and wait until it has struck; return False if no process reached the point in time."""
        inject(self.faults, point, kind, rank)
        return self.wait_struck(point, rank, timeout_s)

    def wait_struck(self, point: str, rank: int | None, timeout_s: float) -> bool:
        """Wait until a requested fault has struck; withdraw it at the timeout and return False."""
        path = self.faults / (point if rank is None else f"{point}.{rank}")
        with contextlib.suppress(AssertionError):
            return wait_until(lambda: not path.exists(), timeout_s=timeout_s)
        path.unlink(missing_ok=True)
        return False

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def log(self) -> str:
        """Return the engine's stderr so far."""
        return self.errors.read_text(encoding="utf-8")

    def wait_log(self, text: str, count: int = 1, timeout_s: float = START_S) -> None:
        """Wait until the log has `text` at least `count` times."""
        wait_until(lambda: self.log().count(text) >= count, lambda: f"{text!r} not logged:\n{self.log()}", timeout_s)

    def wait_exit(self, timeout_s: float = STOP_S) -> int:
        """Wait for the end of the engine; return its exit code. AssertionError at the timeout."""
        wait_until(lambda: self.process.poll() is not None, "the engine runs", timeout_s)
        return int(self.process.returncode)

    def stop(self) -> int:
        """Stop the engine gracefully and return its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait_exit()

    def end(self) -> None:
        """Stop the engine; check that it exits with 0 and leaves nothing behind."""
        self.processes()
        assert self.stop() == 0 and not self.leftovers()

    @property
    def seen_ids(self) -> list[int]:
        """The ids of the noted processes."""
        return [*self._seen]

    def leftovers(self) -> list[str]:
        """Return the noted processes that live, the engine's files but its lock, and the faults that did not strike."""
        alive = [str(process) for process in self._seen.values() if is_alive(process)]
        tree = os.walk(self.runtime / "tokenloom")  # os.walk tolerates folders that vanish during the walk
        files = [f"{path}/{name}" for path, folders, names in tree for name in (*folders, *names) if name != ".lock"]
        return alive + files + [str(path) for path in self.faults.iterdir()]

    def __enter__(self: EngineT) -> EngineT:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(5)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:  # it has just ended
        return ""


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs, or is stopped, and is no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
