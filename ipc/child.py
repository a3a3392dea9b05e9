"""A child process of an engine: its start by the parent, its main function and its channel to the supervisor."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, Protocol

import zmq

from .errors import ConfigError, error_info
from .messages.base import Ping, Pong
from .messages.supervisor import ChildToSupervisor, Failed, SetLogLevel, SupervisorToChild
from .process import log
from .process.lifeline import start_lifeline
from .process.signals import ignore_group_signals
from .process.title import set_title
from .shortages.failure import REMEDIES
from .sockets.channel import Channel
from .sockets.zmq_sockets import new_socket
from .spec.config.engine_spec import EngineSpec, process_name

EXIT_FAULT = 1
EXIT_CONFIG = 2

logger = logging.getLogger("tokenloom.ipc")


class SupervisorChannel(Channel[SupervisorToChild, ChildToSupervisor]):
    """A child's channel to the supervisor: sends Hello, replies to pings and applies log levels by itself."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: EngineSpec, identity: bytes) -> None:
        super().__init__(new_socket(context, zmq.DEALER, identity=identity), SupervisorToChild, "supervisor")
        spec.secure_to_head(self.socket)
        self.socket.connect(spec.endpoints.control)
        self.send(spec.hello)

    def _decode(self, frame: bytes) -> SupervisorToChild | None:
        message = super()._decode(frame)
        if isinstance(message, Ping):
            self.send(Pong())
            return None
        if isinstance(message, SetLogLevel):
            log.set_level(message.level)
        return message

    def report(self, error: Exception) -> None:
        """Send the error that ends this process."""
        self.send(Failed(error=error_info(error)))


class ChildWork(Protocol):
    """The work of a child process. `supervisor` is None in a process that another child has started."""

    @property
    def supervisor(self) -> SupervisorChannel | None: ...

    def run(self) -> int | None:
        """Run until the process is to end; return its exit code, None for 0."""

    def close(self) -> None:
        """Close the sockets, after a short time in which the last messages are sent."""


def run_child(
    name: str,
    new_child: Callable[[EngineSpec], ChildWork],
    before_exit: Callable[[EngineSpec], None] | None = None,
    *,
    replica: int = 0,
) -> int:
    """Set up this process, run its work and return the exit code. If the work raises, send Failed to the supervisor.
    `new_child`: makes the work from the replica's specification.
    `before_exit`: called when the parent has ended, just before this process exits too.
    """
    ignore_group_signals()
    name = process_name(name, replica)
    spec = EngineSpec.from_environment().of_replica(replica)
    take_name(name, spec.config.log_level)
    start_lifeline(None if before_exit is None else partial(before_exit, spec))
    child = new_child(spec)
    try:
        return child.run() or 0
    except Exception as error:
        if not isinstance(error, ConfigError):  # its message is complete without a traceback
            logger.exception("the %s failed", name)
        if child.supervisor is not None:
            child.supervisor.report(error)
        return exit_code_of(error)
    finally:
        child.close()


def take_name(name: str, log_level: str) -> None:
    """Name this process, in the list of processes and in its log."""
    set_title(f"tokenloom {name}")
    log.configure(name, log_level)


def exit_code_of(error: Exception) -> int:
    return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAULT


def limit_address_space(num_bytes: int) -> None:
    """Limit this process's address space to `num_bytes`, and disable core dumps."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def spawn_failure(error: OSError) -> str:
    """Return a description of why a process could not be started, with the remedy."""
    return f"{error.strerror}: {REMEDIES.get(error.errno or 0, f'check {sys.executable}')}"


def spawn_child(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    inherited_fds: Sequence[int] = (),
    stdout: IO[str] | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start `module` in a session of its own and return the process; its standard input is the lifeline. OSError if no
    process can be started; `spawn_failure` describes it.

    The process runs in the caller's folder, or in / if that was removed: torch cannot be imported in a removed folder.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],  # -P: a checkout's folders do not become top-level modules
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        pass_fds=inherited_fds,
        env=environment,
        cwd=None if _has_folder() else "/",
    )


def _has_folder() -> bool:
    """Return whether the current folder still exists."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
