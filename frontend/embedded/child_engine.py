"""ChildEngine: a private engine as a child process, from its start to its end. Knows no request.

The engine ends when its standard input, the lifeline, is closed, even if this process is killed. It writes its
addresses to its standard output, as one line. The child imports nothing from the user's program, so that a script needs
no `__main__` guard.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import site
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO
from weakref import WeakSet

import msgspec

from ...ipc.errors import EngineDead, ErrorInfo, Overloaded, TokenloomError
from ...ipc.process.awake_clock import AwakeClock
from ...ipc.shortages.threads import start_thread
from ...ipc.spec.config.engine_config import CONFIG_VARIABLE, EngineConfig

BEAT_S = 1.0  # beat of the clock that limits the start
NUM_LAST_LINES = 50  # lines of standard error that are kept
NUM_QUOTED_LINES = 10  # of the kept lines, those quoted in an error
STOP_TIMEOUT_S = 5.0  # from the closing of the lifeline to SIGTERM
TERMINATE_TIMEOUT_S = 3.0  # from SIGTERM to SIGKILL
LAST_LINES_TIMEOUT_S = 0.5  # longest time to read the last output of the dead process
COMMAND = (sys.executable, "-P", "-m", "tokenloom.frontend.launch")  # -P: keep the folders of a checkout off sys.path


class _StartResult(msgspec.Struct, frozen=True):
    """Line on the engine's standard output after its start: addresses or an error."""

    addresses: list[str] = []
    http_address: str | None = None
    error: ErrorInfo | None = None


class ChildEngine:
    """Private engine as a child process. It serves clients at `addresses`, with --http also at `http_address`.

    Any thread may call `stop`.
    """

    def __init__(self, config: EngineConfig, command: Sequence[str] = COMMAND) -> None:
        """Start the engine and wait until it serves. Raises the engine's error if it fails, EngineDead if it ends or
        does not serve within `config.start_timeout_s`, Overloaded if no thread can be started."""
        self._pid = os.getpid()
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._is_stopping = False
        self.stop_timeout_s, self.terminate_timeout_s = STOP_TIMEOUT_S, TERMINATE_TIMEOUT_S
        self._on_death: Callable[[TokenloomError], None] | None = None
        self._lock = threading.Lock()  # guards _on_death and _death
        self._death: EngineDead | None = None
        self._process = _start(command, config)
        assert self._process.stdin is not None and self._process.stdout is not None
        self.lifeline = self._process.stdin
        _engines.add(self)
        try:
            self._reader = start_thread("tokenloom engine stderr", self._read_stderr)
            self._watcher = start_thread("tokenloom engine watch", self._watch)
        except Overloaded:
            self.lifeline.close()
            self._process.kill()
            self._process.wait()
            raise
        try:
            with self._process.stdout as ready:
                self.addresses, self.http_address = self._wait_ready(ready, config.start_timeout_s)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def on_death(self, callback: Callable[[TokenloomError], None]) -> None:
        """Set the callback that is called with EngineDead if the engine ends without `stop`; at once if it has ended
        already."""
        with self._lock:
            self._on_death = callback
            death = self._death
        if death is not None:
            callback(death)

    def stop(self) -> None:
        """End the engine and wait: close the lifeline, after 5 s SIGTERM, after 3 s more SIGKILL. May be repeated."""
        if os.getpid() != self._pid:
            return
        self._is_stopping = True
        self.lifeline.close()
        timeouts = ((self.stop_timeout_s, signal.SIGTERM), (self.terminate_timeout_s, signal.SIGKILL))
        for timeout_s, signal_number in timeouts:
            self._watcher.join(timeout_s)
            if not self._watcher.is_alive():
                break
            self._process.send_signal(signal_number)
        self._watcher.join(TERMINATE_TIMEOUT_S)
        self._reader.join(LAST_LINES_TIMEOUT_S)

    def _wait_ready(self, ready: IO[bytes], timeout_s: float) -> tuple[list[str], str | None]:
        clock, poller, line = AwakeClock(BEAT_S), select.poll(), b""
        poller.register(ready, select.POLLIN)
        deadline = clock.now + timeout_s
        while not line.endswith(b"\n"):
            if not poller.poll(1000 * clock.patience_s(deadline)):
                if clock.look() < deadline:
                    continue
                raise EngineDead(
                    f"the engine did not start within {timeout_s:g} s{self._quoted()}: raise start_timeout_s if the "
                    "model is large"
                )
            data = os.read(ready.fileno(), 1 << 16)
            if not data:
                self._watcher.join(TERMINATE_TIMEOUT_S)
                raise self._death or EngineDead(f"the engine ended its start{self._quoted()}")
            line += data
        result = msgspec.json.decode(line, type=_StartResult)
        if result.error is not None:
            raise result.error.to_exception()
        return result.addresses, result.http_address

    def _read_stderr(self) -> None:
        """Copy the engine's standard error to that of this process, and keep its last lines for errors."""
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                text = line.decode(errors="replace")
                self._last_lines.append(text.rstrip())
                with contextlib.suppress(Exception):  # sys.stderr may be replaced or closed
                    sys.stderr.write(text)

    def _watch(self) -> None:
        code = self._process.wait()
        self._reader.join(LAST_LINES_TIMEOUT_S)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        with self._lock:
            self._death = EngineDead(f"the engine (pid {self._process.pid}) {how}{self._quoted()}")
            callback = None if self._is_stopping else self._on_death
        self.lifeline.close()
        if callback is not None:
            callback(self._death)

    def _quoted(self) -> str:
        lines = [line for line in self._last_lines if line]
        return "; its last lines:\n  " + "\n  ".join(lines[-NUM_QUOTED_LINES:]) if lines else ", without output"


_engines: WeakSet[ChildEngine] = WeakSet()


def _after_fork() -> None:
    """Close the copies of the lifelines in a forked child, which must not keep the engines alive."""
    for engine in _engines:
        engine.lifeline.close()


os.register_at_fork(after_in_child=_after_fork)


def _start(command: Sequence[str], config: EngineConfig) -> subprocess.Popen[bytes]:
    environment: dict[str, str | bytes] = {**_environment(), CONFIG_VARIABLE: msgspec.json.encode(config)}
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=environment,
    )


def _environment() -> dict[str, str]:
    """Return an environment in which `python -P -m` imports the same package as this process.

    An installed package needs nothing. For a checkout or link on sys.path, its folder is added to PYTHONPATH.
    """
    environment = dict(os.environ)
    environment["PYTHONUTF8"] = "1"  # file names do not depend on this program's locale
    package = Path(__file__).parents[2]
    folder = str(package.parent)
    installed = {*site.getsitepackages(), site.getusersitepackages()}
    if package.name == "tokenloom" and folder not in installed and folder in map(os.path.abspath, sys.path):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, environment.get("PYTHONPATH")]))
    return environment
