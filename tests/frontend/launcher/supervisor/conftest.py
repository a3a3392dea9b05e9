"""The engine of remote processes of a test, with the options that the test gives by an indirect parameter."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tokenloom.frontend.launcher.supervisor.signal_watch import STOP_SIGNALS
from tokenloom.frontend.listening.http_listeners import HttpListeners
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.frontend.launcher.supervisor.remote_engine import RemoteEngine
from tokenloom.tests.support.engine_specs import new_spec

DEADLINE_S = 60
HANG_TIMEOUT_S = 0.5


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[RemoteEngine]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    numbers = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    signal.alarm(DEADLINE_S)
    options = {"tensor_parallel_size": 2, "hang_timeout_s": HANG_TIMEOUT_S, **getattr(request, "param", {})}
    listeners = HttpListeners()
    listeners.open(EngineConfig(http="127.0.0.1:0", uds=str(tmp_path / "http.sock")))
    with zmq.Context() as context:
        spec = new_spec(run_directory=str(tmp_path), config=EngineConfig(**options))
        engine = RemoteEngine(context, spec, listeners)
        yield engine
        engine.supervisor.stop()
        assert all(process.is_closed for process in engine.processes)
    signal.alarm(0)
    if engine.supervisor._signals is not None:
        os.close(signal.set_wakeup_fd(-1))
        os.close(engine.supervisor._signals.fd)
    for number, handler in handlers.items():
        signal.signal(number, handler)
