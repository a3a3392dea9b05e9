"""SupervisorLink: the control socket to the supervisor.

While the core waits for workers, messages are deferred, except those that end the wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import zmq

from ...ipc.codec import Decoder, encode
from ...ipc.config.engine_spec import EngineSpec
from ...ipc.errors import EngineDead
from ...ipc.messages.base import Ping, Pong
from ...ipc.messages.supervisor import ChildToSupervisor, SetLogLevel, Stop, SupervisorToChild, WorkersDown
from ...ipc.process import log
from ...ipc.sockets import new_socket, receive


class SupervisorLink:
    """Owns the control socket and the deferred messages."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: EngineSpec, core_epoch: int) -> None:
        self.socket = new_socket(context, zmq.DEALER, identity=b"core-%d" % core_epoch)
        self.socket.connect(spec.address("control"))
        self._decoder: Decoder[SupervisorToChild] = Decoder(SupervisorToChild)
        self._put_off: deque[SupervisorToChild] = deque()
        self.tell(spec.hello)

    def tell(self, message: ChildToSupervisor) -> None:
        self.socket.send(encode(message))

    @property
    def has_put_off(self) -> bool:
        """Whether there are deferred messages, which do not wake a poller."""
        return bool(self._put_off)

    def wait(self) -> SupervisorToChild:
        """Wait for the next message."""
        while True:
            message = self._decoder.decode(self.socket.recv())
            if not self._obey(message):
                return message

    def receive(self) -> Iterator[SupervisorToChild]:
        """Return all received messages, deferred ones first."""
        while self._put_off:
            yield self._put_off.popleft()
        for (frame,) in receive(self.socket):
            message = self._decoder.decode(frame)
            if not self._obey(message):
                yield message

    def _obey(self, message: SupervisorToChild) -> bool:
        """Handle a message that does not concern the engine; False if it does."""
        if isinstance(message, SetLogLevel):
            log.set_level(message.level)
        elif isinstance(message, Ping):
            self.tell(Pong())
        else:
            return False
        return True

    def put_off(self, generation: int) -> None:
        """Defer received messages; EngineDead if one ends the wait for the workers of `generation`."""
        later, self._put_off = self._put_off, deque()
        try:
            for message in self.receive():
                later.append(message)
                if isinstance(message, WorkersDown) and message.generation == generation:
                    raise EngineDead(message.reason)
                if isinstance(message, Stop):
                    raise EngineDead("the engine stops")
        finally:
            self._put_off = later
