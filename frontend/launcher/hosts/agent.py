"""HostAgent: `engine-launch join`, on each host of an engine except the head. Starts, watches and kills the ranks.

It is a daemon: it waits for a head, serves it, and waits again. The head sends a message every second. After LEASE_S of
silence, or if it loses the head in another way, the agent kills its processes before it looks for a head again. So a
host that was cut off holds no memory and no GPU for a group that is lost. It starts only workers and a tier process,
and only for a head that has its key, its version and its checkpoint.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

import msgspec
import zmq

from ....ipc.errors import ErrorInfo, Overloaded, TokenloomError, error_info
from ....ipc.messages.base import Ping, Rank
from ....ipc.messages.hosts import (
    Ended,
    HeadToAgent,
    HostAccepted,
    HostFailed,
    HostLeaving,
    HostPrepared,
    HostRefused,
    HostReleased,
    HostReport,
    HostUnknown,
    Kill,
    ProcessUse,
    Spawn,
    Spawned,
    Words,
)
from ....ipc.process.arena import new_arena
from ....ipc.process.log import write_line
from ....ipc.process.service_manager import READY, notify
from ....ipc.shortages.threads import start_thread
from ....ipc.sockets.addresses import RunDirectory
from ....ipc.sockets.keys import Keys
from ....ipc.spec.config.checkpoint_digest import checkpoint_digest
from ....ipc.spec.config.engine_spec import EngineSpec
from ...checkpoint.draft_model import draft_on_this_host
from ...checkpoint.hub import find_checkpoint
from ..supervisor.launcher import ProcessSpec, Unit, UnstartedProcess
from ..supervisor.local_launcher import LocalLauncher, LocalProcess
from ..supervisor.signal_watch import SignalWatch
from .head_link import HeadAddress, HeadLink

logger = logging.getLogger("tokenloom.host")

RETRY_MS = 1000


class HeadLostError(Exception):
    """The connection to a head has ended; the message says why."""


class HostAgent:
    """Agent that serves one head after the other."""

    def __init__(self, address: HeadAddress, keys: Keys, placement: str = "") -> None:
        """`placement`: the name of this agent at the launcher process that placed it; "" if it was started by hand."""
        self._address, self._keys, self._placement = address, keys, placement
        self._signals = SignalWatch()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._last_obstacle = ""

    def run(self) -> None:
        """Serve heads until a stop signal. ConfigError if the head refuses this host for good, or this host cannot find
        the checkpoint."""
        notify(READY, f"waits for {self._address.head}")
        try:
            while not self._signals.stops:
                try:
                    self._serve()
                except (HeadLostError, OSError) as error:
                    self._log_obstacle(str(error))
        finally:
            self._context.destroy()

    def _serve(self) -> None:
        """Serve the next head until a stop signal. HeadLostError or OSError if there is no head, or it is lost."""
        try:
            link = HeadLink(self._context, self._address, self._keys, self._placement)
        except OSError:
            self._rest()
            raise
        processes = HostProcesses(link)
        try:
            while not self._signals.stops:
                self._wait(link, processes)
                for message in link.receive():
                    self._take(message, link, processes)
                processes.turn()
                if link.lease_s <= 0:
                    if link.has_heard:
                        raise HeadLostError(f"{self._address.head} has sent nothing for too long")
                    raise HeadLostError(f"{self._address.head} does not answer: is an engine with --hosts there?")
        finally:
            processes.close()
            if self._signals.stops:
                link.send(HostLeaving())
            link.close()

    def _wait(self, link: HeadLink, processes: HostProcesses) -> None:
        """Wait for a message, a signal, an event of a process, or the end of the lease."""
        poller = zmq.Poller()
        for source in (link.socket, link.monitor, self._signals.fd, *processes.wakers):
            poller.register(source, zmq.POLLIN)
        poller.poll(max(int(link.lease_s * 1000), 0) + 1)
        self._signals.take_requests()

    def _rest(self) -> None:
        """Wait RETRY_MS or until a signal."""
        poller = zmq.Poller()
        poller.register(self._signals.fd, zmq.POLLIN)
        poller.poll(RETRY_MS)
        self._signals.take_requests()

    def _take(self, message: HeadToAgent, link: HeadLink, processes: HostProcesses) -> None:
        if isinstance(message, Ping):
            link.send(processes.report())
        elif isinstance(message, HostAccepted):
            self._last_obstacle = ""
            logger.info("serves the engine at %s", self._address.head)
            processes.prepare(message.spec)
        elif isinstance(message, Spawn):
            processes.spawn(message)
        elif isinstance(message, Kill):
            processes.kill(message.process)
        elif isinstance(message, HostRefused):
            raise message.error.to_exception()
        elif isinstance(message, HostReleased):
            raise HeadLostError(f"the engine at {self._address.head} has ended")
        elif isinstance(message, HostUnknown):
            raise HeadLostError(f"{self._address.head} has given this host up after a silence")

    def _log_obstacle(self, reason: str) -> None:
        """Log why there is no head, unless the last reason was the same."""
        if reason != self._last_obstacle:
            logger.warning("%s; waits for %s", reason, self._address.head)
        self._last_obstacle = reason


class HostProcesses:
    """The processes that this agent has started for one head, and its run directory on this host."""

    def __init__(self, link: HeadLink) -> None:
        self._link = link
        self._run_directory: RunDirectory | None = None
        self._launcher: LocalLauncher | None = None
        self._process_by_key: dict[str, LocalProcess] = {}
        self._arena_fds: list[int] = []  # of each replica's arena on this host; empty without KV tiers
        self._lines: list[str] = []  # lines of stderr not yet sent to the head
        self._prepared_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Lock()
        self._is_closed = False
        self._preparation: tuple[EngineSpec, str] | ErrorInfo | None = None  # (spec, checkpoint's digest) or error

    @property
    def wakers(self) -> list[int]:
        """File descriptors that are readable when `turn` has something to do."""
        return [self._prepared_fd, *(fd for each in self._process_by_key.values() for fd in each.wake_fds)]

    def prepare(self, spec: bytes) -> None:
        """Start a thread that finds the engine's checkpoint, which may have to be downloaded. HeadLostError if no
        thread can be started."""
        self._run_directory = RunDirectory.create()
        engine, folder = msgspec.json.decode(spec, type=EngineSpec), str(self._run_directory.path)
        self._arena_fds = [new_arena() for _ in range(engine.config.data_parallel_size) if engine.uses_tiers]

        def find() -> None:
            try:
                model_folder = find_model(engine, Path(folder))
                digest = checkpoint_digest(model_folder)
                draft = draft_on_this_host(engine, Path(folder), model_folder)
                self._preparation = (engine.on_host(self._link.own, folder, str(model_folder), draft), digest)
            except (TokenloomError, OSError) as error:
                self._preparation = error_info(error)
            with self._closing:
                if not self._is_closed:  # else another file may have the number of the descriptor
                    os.eventfd_write(self._prepared_fd, 1)

        try:
            start_thread("checkpoint", find)
        except Overloaded as error:
            raise HeadLostError(str(error)) from None

    def turn(self) -> None:
        """Before the preparation is complete, report its end to the head, and raise its error if it has failed.
        Afterwards report new lines of stderr and ended processes."""
        if self._launcher is None:
            self._finish_preparation()
            return
        self._launcher.turn()
        for key, process in list(self._process_by_key.items()):
            if process.has_ended:
                process.forward_stderr()
                self._send_lines()
                self._link.send(Ended(process=key, how=process.describe_exit()))
                process.close()
                del self._process_by_key[key]
        self._send_lines()

    def _finish_preparation(self) -> None:
        if isinstance(self._preparation, ErrorInfo):
            self._link.send(HostFailed(error=self._preparation))
            raise self._preparation.to_exception()
        if self._preparation is not None:
            spec, digest = self._preparation
            os.eventfd_read(self._prepared_fd)
            self._launcher = LocalLauncher(spec.environment(), self._on_line)
            self._link.send(HostPrepared(digest=digest))

    def _on_line(self, line: str) -> None:
        write_line(line, sys.stderr)
        self._lines.append(line)

    def _send_lines(self) -> None:
        if self._lines:
            self._link.send(Words(lines=self._lines))
            self._lines = []

    def report(self) -> HostReport:
        uses = [
            ProcessUse(key, process.take_starved_s(), process.resident_bytes())
            for key, process in self._process_by_key.items()
        ]
        return HostReport(processes=uses)

    def spawn(self, order: Spawn) -> None:
        if self._launcher is None:
            raise HeadLostError("the head starts a process before this host has its checkpoint")
        unit, rank = Unit(order.role, order.replica), Rank.parse(order.rank) if order.rank else None
        fds = [self._arena_fds[order.replica]] if self._arena_fds else []
        arguments = [*order.arguments, *(f"--arena-fd={fd}" for fd in fds)]
        spec = ProcessSpec(unit, order.number, rank, order.host, arguments, fds)
        try:
            process = self._launcher.spawn(spec)
        except OSError as error:
            self._link.send(Ended(process=order.process, how=UnstartedProcess(spec.name, error).describe_exit()))
            return
        self._process_by_key[order.process] = process
        self._link.send(Spawned(process=order.process, pid=process.pid))

    def kill(self, key: str) -> None:
        """Kill a process, wait for its end and report it."""
        if (process := self._process_by_key.pop(key, None)) is not None:
            process.close()
            self._link.send(Ended(process=key, how=process.describe_exit()))

    def close(self) -> None:
        """Kill all processes, and remove the run directory and the arenas."""
        for process in self._process_by_key.values():
            process.close()
        self._process_by_key.clear()
        if self._run_directory is not None:
            self._run_directory.remove()
        while self._arena_fds:
            os.close(self._arena_fds.pop())
        with self._closing:
            self._is_closed = True
            os.close(self._prepared_fd)


def find_model(spec: EngineSpec, spare: Path | None = None) -> Path:
    """Return the folder of the engine's checkpoint on this host: the head's path if it exists here, else the one that
    --model names, which is downloaded if needed. `spare`: see find_checkpoint. ConfigError if there is none."""
    if os.path.isdir(spec.model_folder):
        return Path(spec.model_folder)
    return find_checkpoint(spec.config.model, spec.config.revision, config=spec.config, spare=spare)
