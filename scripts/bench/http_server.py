"""HTTP servers under measurement, ours and others', each started by its command on a port of this machine."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from tokenloom.scripts.bench.contestant import START_TIMEOUT_S, STOP_TIMEOUT_S

HOST = "127.0.0.1"
POLL_S = 0.02


def free_port() -> int:
    """Return a port on which nothing listens at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Server:
    """A server process group on its own port."""

    def __init__(
        self, name: str, command: Sequence[str], port: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.port = name, port
        self._process = subprocess.Popen(
            command, stdout=sys.stderr, env={**os.environ, **(environment or {})}, cwd="/", start_new_session=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until /health answers with 200; SystemExit if the server ends, or after START_TIMEOUT_S."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if self._is_healthy():
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name} is not ready (exit code {self._process.returncode})")
            time.sleep(POLL_S)  # the server gives no sign when it starts to listen

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
