"""A real Redis or Valkey server for the tests of the remote source, on a socket file and a loopback port."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tokenloom.core.tiers.network.resp import Connection, Reply, command
from tokenloom.tests.support.waiting import wait_until

DEADLINE_S = 20.0
BINARY = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = pytest.mark.skipif(BINARY is None, reason="there is no redis-server or valkey-server on this machine")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A server with its data in memory. `options` are those of its command line."""

    def __init__(self, folder: Path, *options: str, password: str = "", port: int | None = None) -> None:
        assert BINARY is not None
        self.port = free_port() if port is None else port
        self.path = folder / f"redis-{self.port}.sock"
        self.password, self.login = password, f":{password}@" if password else ""
        self.arguments = [BINARY, "--save", "", "--appendonly", "no", "--dir", str(folder)]
        self.arguments += ["--unixsocket", str(self.path), "--bind", "127.0.0.1"]
        self.arguments += ["--requirepass", password] if password else []
        self.arguments += options if "--tls-port" in options else ["--port", str(self.port), *options]
        self.start()

    @property
    def url(self) -> str:
        return f"redis://{self.login}127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.login}{self.path}?db=0"

    def start(self) -> None:
        """Start, and wait until the server answers."""
        self.process = subprocess.Popen(self.arguments, stdout=subprocess.DEVNULL)
        wait_until(self._answers, "the server does not start")

    def _answers(self) -> bool:
        assert self.process.poll() is None, "the server has ended"
        with contextlib.suppress(OSError):
            return self.ask(b"PING") == b"PONG"
        return False

    def ask(self, *words: bytes) -> Reply:
        """Send one command over the socket file, and return the reply."""
        deadline = time.monotonic() + DEADLINE_S
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(self.path))
            connection = Connection(sock)
            if self.password:
                connection.send([command(b"AUTH", self.password.encode())], deadline)
                connection.receive(deadline)
            connection.send([command(*words)], deadline)
            return connection.receive(deadline)

    def names(self) -> list[bytes]:
        """Return the names of all values."""
        names = self.ask(b"KEYS", b"*")
        assert isinstance(names, list)
        return sorted(name for name in names if isinstance(name, bytes))

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
