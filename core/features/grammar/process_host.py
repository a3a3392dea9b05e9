"""GrammarProcessHost: a GrammarHost (host.py) that starts the grammar process and talks to it over a socket."""

from __future__ import annotations

import logging
import os
import subprocess

import zmq

from ....ipc.child import spawn_child, spawn_failure
from ....ipc.messages.grammar import CloseGrammars, CoreToGrammar, GrammarToCore
from ....ipc.process.log import is_worth_a_line
from ....ipc.sockets.addresses import unlink_ipc_address
from ....ipc.sockets.channel import Channel
from ....ipc.sockets.zmq_sockets import new_socket
from ....ipc.spec.config.engine_spec import EngineSpec
from .host import GrammarHostLost, GrammarHostUnavailable

logger = logging.getLogger("tokenloom.core")


class GrammarProcessHost:
    """Owns the grammar process, which the first message starts: the socket to it, its pid and its lifeline."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], spec: EngineSpec, address: str, *, is_prover: bool = False
    ) -> None:
        """address: the process binds it. is_prover: it compiles grammars for a GrammarProver, and makes no masks."""
        self._context, self._spec, self._address, self._is_prover = context, spec, address, is_prover
        self._name = "prover of grammars" if is_prover else "grammar process"
        self._channel: Channel[GrammarToCore, CoreToGrammar] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pid_fd = -1
        self._num_unstarted = self._num_ended = 0

    @property
    def has_process(self) -> bool:
        return self._process is not None

    @property
    def wakers(self) -> list[zmq.Socket[bytes] | int]:
        """The sockets and descriptors to poll: answers, and the end of the process."""
        return [] if self._channel is None else [self._channel.socket, self._pid_fd]

    def send(self, message: CoreToGrammar) -> None:
        if self._channel is None:
            if isinstance(message, CloseGrammars):
                return
            try:
                self._channel = self._start()
            except OSError as error:
                self._num_unstarted += 1
                if is_worth_a_line(self._num_unstarted):
                    logger.warning("the %s cannot be started: %s", self._name, spawn_failure(error))
                raise GrammarHostUnavailable from None
        self._channel.send(message)

    def receive(self) -> list[GrammarToCore]:
        if self._channel is None or self._process is None:
            return []
        has_ended = self._process.poll() is not None  # checked first: answers sent before the end are valid
        messages = list(self._channel.receive())
        if has_ended and not messages:
            code = self._process.returncode
            self.stop()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._num_ended += 1
            if is_worth_a_line(self._num_ended):
                logger.warning("the %s ended by %s; another one is started when it is needed", self._name, how)
            raise GrammarHostLost(how)
        return messages

    def stop(self) -> None:
        """Kill the process; the next message starts another one."""
        if self._channel is None or self._process is None:
            return
        self._process.kill()
        self._process.communicate()  # closes the lifeline, and waits
        unlink_ipc_address(self._channel.socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._channel.socket.close()
        os.close(self._pid_fd)
        self._channel = self._process = None

    def _start(self) -> Channel[GrammarToCore, CoreToGrammar]:
        arguments = ["--address", self._address, *(["--prover"] if self._is_prover else [])]
        process = spawn_child("tokenloom.core.features.grammar.process", arguments, self._spec.environment())
        self._process, self._pid_fd = process, os.pidfd_open(process.pid)
        socket = new_socket(self._context, zmq.DEALER)
        socket.connect(
            self._address
        )  # the process binds: if this socket did, a send would block until the process connects
        return Channel(socket, GrammarToCore, self._name)
