"""The engine that a harness harms: started by the command, as an operator would, with a folder of faults to inject."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import psutil

from tokenloom.ipc.faults import inject

START_S = 60.0


class Engine:
    """Owns the process and what it writes; `address` is where clients attach, `url` the HTTP server with --http."""

    def __init__(self, runtime: Path, arguments: list[str]) -> None:
        self.runtime = runtime
        self.faults = runtime / "faults"
        self.faults.mkdir()
        command = [sys.executable, "-m", "tokenloom.frontend.launch"]
        environment = os.environ | {"XDG_RUNTIME_DIR": str(runtime), "TOKENLOOM_FAULTS": str(self.faults)}
        self.errors = (runtime / "stderr").open("w+")
        self.process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=self.errors, cwd="/", env=environment, text=True
        )
        self.lines: deque[str] = deque(maxlen=100)  # of stdout, the last ones
        self.address, self.url = self._wait_ready()
        self.seen: dict[int, psutil.Process] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _wait_ready(self) -> tuple[str, str]:
        """The clients' address, and that of the HTTP server or nothing."""
        assert self.process.stdout is not None
        deadline, text = time.monotonic() + START_S, ""
        while select.select([self.process.stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
            data = os.read(self.process.stdout.fileno(), 1 << 16)  # select knows nothing of Python's own buffer
            text += data.decode()
            for line in text.split("\n")[:-1]:
                if line.startswith("Ready"):
                    places = [word for word in line.split() if "://" in word]
                    return places[0], "".join(places[1:])
            if not data:
                break
        raise SystemExit(f"the engine did not start:\n{Path(self.errors.name).read_text()}")

    def _read(self) -> None:
        """Nothing may fill the pipe."""
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def find(self, role: str) -> psutil.Process | None:
        """The living process called `tokenloom ROLE`; None while it is being replaced."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            self.seen[process.pid] = process
            if _title(process) == f"tokenloom {role}":
                return process
        return None

    def inject(self, point: str, kind: str, rank: int | None, timeout_s: float) -> bool:
        """Ask for a fault and wait until it has struck; False if nobody passed the point in time."""
        path = inject(self.faults, point, kind, rank)
        deadline = time.monotonic() + timeout_s
        while path.exists():
            if time.monotonic() > deadline:
                path.unlink(missing_ok=True)
                return False
            time.sleep(0.001)
        return True

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def close(self) -> None:
        """Kill what is left and close the files."""
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        self.errors.close()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def leftovers(self) -> list[str]:
        """Processes and files of the engine that are still there."""
        alive = [
            str(process) for process in self.seen.values() if process.is_running() and process.status() != "zombie"
        ]
        files = [str(path) for path in (self.runtime / "tokenloom").rglob("*") if path.name != ".lock"]
        return alive + files + [str(path) for path in self.faults.iterdir()]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:  # it has just ended
        return ""
