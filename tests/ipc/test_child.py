"""A child process reports its end with Failed and an exit code, and serves pings and log levels by itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tokenloom.ipc.messages.base import Hello, Ping, Pong
from tokenloom.ipc.messages.supervisor import ChildToSupervisor, Drained, Failed, SetLogLevel, Stop, SupervisorToChild
from tokenloom.ipc.sockets.channel import Channel
from tokenloom.ipc.sockets.zmq_sockets import new_socket
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.tests.support.engine_specs import new_spec

DEADLINE_S = 30
IDENTITY = b"sample-0"
SCRIPT = """
import logging, os, signal, sys
import zmq
from tokenloom.ipc.child import SupervisorChannel, run_child
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.messages.supervisor import Drained

class Sample:
    def __init__(self, spec):
        self._context = zmq.Context()
        self.supervisor = SupervisorChannel(self._context, spec, b"sample-0") if "alone" not in sys.argv else None

    def run(self):
        os.kill(os.getpid(), signal.SIGINT)
        if self.supervisor is not None:
            logging.getLogger("tokenloom").debug("%s", type(self.supervisor.wait()).__name__)
            self.supervisor.wait()
            self.supervisor.send(Drained())
        {}

    def close(self):
        self._context.destroy(linger=1000)
        print("closed", file=sys.stderr)

sys.exit(run_child("sample", Sample))
"""

Supervisor = Channel[ChildToSupervisor, SupervisorToChild]


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    return new_spec(run_directory=str(tmp_path))


@pytest.fixture
def supervisor(spec: EngineSpec) -> Iterator[Supervisor]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = new_socket(context, zmq.ROUTER)
    socket.bind(spec.endpoints.control)
    yield Channel(socket, ChildToSupervisor, "children")
    context.destroy(linger=0)


def start(spec: EngineSpec, last_words: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", SCRIPT.format(last_words), *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=spec.environment(), cwd="/"
    )


def words_of(process: subprocess.Popen[str], code: int) -> str:
    """Wait for the end of the process; return its log."""
    assert process.wait(DEADLINE_S) == code
    assert process.stderr is not None
    return process.stderr.read()


def receive(supervisor: Supervisor) -> ChildToSupervisor:
    assert supervisor.socket.poll(DEADLINE_S * 1000)
    identity, message = next(supervisor.receive_from())
    assert identity == IDENTITY
    return message


@pytest.mark.parametrize(
    ("last_words", "kind", "code"),
    [
        ("", None, 0),
        ("return 7", None, 7),
        ("raise ConfigError('set --this')", "config", 2),
        ("raise KeyError('a bug')", "internal", 1),
    ],
)
def test_the_end_of_a_child_is_reported(
    supervisor: Supervisor, spec: EngineSpec, last_words: str, kind: str | None, code: int
) -> None:
    with start(spec, last_words) as process:
        assert isinstance(receive(supervisor), Hello)
        supervisor.send_to(IDENTITY, Ping())
        assert receive(supervisor) == Pong()
        supervisor.socket.send_multipart([IDENTITY, b"\xc1"])
        supervisor.send_to(IDENTITY, SetLogLevel(level="debug"))
        supervisor.send_to(IDENTITY, Stop())
        assert receive(supervisor) == Drained()
        if kind is not None:
            failed = receive(supervisor)
            assert isinstance(failed, Failed) and failed.error.kind == kind
        words = words_of(process, code)
    assert "DEBUG sample: SetLogLevel" in words and "1 malformed from the supervisor" in words
    assert words.count("closed") == 1
    assert ("sample: the sample failed" in words and "Traceback" in words) == (kind == "internal")


def test_a_child_without_a_supervisor_logs_its_error(spec: EngineSpec) -> None:
    with start(spec, "raise KeyError('a bug')", "alone") as process:
        words = words_of(process, code=1)
    assert "ERROR sample: the sample failed" in words and "KeyError: 'a bug'" in words


def test_a_child_ends_with_its_parent(spec: EngineSpec) -> None:
    with start(spec, "import threading; threading.Event().wait()", "alone") as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 113
