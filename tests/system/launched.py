"""Engines started by the command for tests, which must leave nothing behind, and the losses of their processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pytest

from tokenloom import Client
from tokenloom.ipc.messages.client import Health
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.waiting import wait_until

RECOVERY_S = 60.0


class LaunchedEngine(Engine):
    """An engine on one CPU thread. Leaving a `with` checks that no process and no file is left."""

    def __init__(
        self, runtime: Path, *arguments: str, more: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        super().__init__(runtime, [*arguments, "--num-threads", "1", "--device", "cpu"], more, prefix=prefix)

    def wait_http(self) -> str:
        """Wait until the engine is ready and return the URL of its HTTP server."""
        self.wait_ready()
        return self.url

    def check_nothing_is_left(self, within_s: float = 3.0) -> None:
        """Check that the engine's processes and files are gone, or go within seconds of a `Deadline`."""
        wait_until(lambda: not self.leftovers(), lambda: f"left behind: {self.leftovers()}", within_s, self.seen_ids)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self.check_nothing_is_left()


def newest_engine() -> list[psutil.Process]:
    """Return the processes of the engine that this program started last, as by LLM: others may run beside it."""
    engines = [child for child in psutil.Process().children() if "tokenloom supervisor" in " ".join(child.cmdline())]
    supervisor = max(engines, key=psutil.Process.create_time)
    return [supervisor, *supervisor.children(recursive=True)]


def serve(engine: Engine) -> Iterator[Engine]:
    """Yield the engine once it is ready, for a fixture; at the end check that it exits with 0 and leaves nothing."""
    with engine:
        engine.wait_ready()
        yield engine
        engine.end()


def served(*options: str) -> Any:
    """Return a fixture for a module: an engine with these options that `serve` starts and ends."""

    @pytest.fixture(scope="module")
    def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
        yield from serve(LaunchedEngine(tmp_path_factory.mktemp("run"), *options))

    return engine


@pytest.fixture
def client(engine: Engine) -> Iterator[Client]:
    """Yield a client of a module's engine; it outlives a frontend."""
    with reconnecting(engine) as client:
        yield client


def reconnecting(engine: Engine, place: int = 0) -> Client:
    """Return a client of a frontend that waits for the one that takes its place."""
    return Client(engine.addresses[place], reconnect_timeout_s=RECOVERY_S)


@contextlib.contextmanager
def lost(engine: Engine, name: str, number: signal.Signals = signal.SIGKILL) -> Iterator[None]:
    """Signal a process, so that it is lost; at the end of the `with`, wait until another one is ready in its place, and
    all ranks of its group if it is one."""
    is_back = re.compile(" supervisor: {} is back\n".format(re.sub(r"^worker \d+", r"worker \\d+", name)))
    count = len(is_back.findall(engine.log()))
    os.kill(engine.child(name).pid, number)
    yield
    wait_until(lambda: len(is_back.findall(engine.log())) > count, engine.log, RECOVERY_S)


def wait_health(client: Client, num_restarts: int) -> Health:
    """Return health once it counts `num_restarts` restarts and the engine serves."""

    def is_so() -> bool:
        health = client.health()
        return health.num_restarts >= num_restarts and health.is_ready

    wait_until(is_so, client.health, RECOVERY_S)
    return client.health()
