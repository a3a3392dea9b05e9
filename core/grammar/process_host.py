"""GrammarProcessHost: the grammar process, a GrammarHost (manager.py) behind a socket."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import zmq

from ...ipc.addresses import unlink_ipc_address
from ...ipc.codec import Decoder, encode
from ...ipc.config.engine_spec import EngineSpec
from ...ipc.messages.grammar import CloseGrammars, CoreToGrammar, GrammarToCore
from ...ipc.sockets import new_socket, receive
from .manager import GrammarHostLost

logger = logging.getLogger("tokenloom.core")


class GrammarProcessHost:
    """Owns the grammar process, which the first message starts: the socket to it, its pid and its lifeline."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: EngineSpec, core_epoch: int) -> None:
        self._context, self._spec, self._core_epoch = context, spec, core_epoch
        self._socket: zmq.Socket[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pid_fd = -1
        self._decoder: Decoder[GrammarToCore] = Decoder(GrammarToCore)

    @property
    def has_process(self) -> bool:
        return self._process is not None

    @property
    def wakers(self) -> list[zmq.Socket[bytes] | int]:
        """The sockets and descriptors to poll: answers, and the end of the process."""
        return [] if self._socket is None else [self._socket, self._pid_fd]

    def send(self, message: CoreToGrammar) -> None:
        if self._socket is None:
            if isinstance(message, CloseGrammars):
                return
            self._start()
        assert self._socket is not None
        self._socket.send(encode(message))

    def receive(self) -> list[GrammarToCore]:
        if self._socket is None or self._process is None:
            return []
        has_ended = self._process.poll() is not None  # checked first: answers sent before the end are valid
        messages = [self._decoder.decode(frame) for (frame,) in receive(self._socket)]
        if has_ended and not messages:
            code = self._process.returncode
            self.stop()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            logger.warning("the grammar process ended by %s; another one is started when it is needed", how)
            raise GrammarHostLost(how)
        return messages

    def stop(self) -> None:
        """Kill the process; the next message starts another one."""
        if self._socket is None or self._process is None:
            return
        self._process.kill()
        self._process.communicate()  # closes the lifeline, and waits
        unlink_ipc_address(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._socket.close()
        os.close(self._pid_fd)
        self._socket = self._process = None

    def _start(self) -> None:
        address = self._spec.address(f"grammar-{self._core_epoch}")
        self._socket = new_socket(self._context, zmq.DEALER)
        self._socket.connect(
            address
        )  # the process binds: if this socket did, a send would block until the process connects
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tokenloom.core.grammar.process", "--address", address],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env=self._spec.environment(),
        )
        self._pid_fd = os.pidfd_open(self._process.pid)
