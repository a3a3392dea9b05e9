"""SupervisorLink: the core's channel to the supervisor.

While the core waits for workers, received messages are deferred until it is done; some of them end the wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import zmq

from ...ipc.child import SupervisorChannel
from ...ipc.errors import EngineDead
from ...ipc.messages.supervisor import Stop, SupervisorToChild, WorkersDown
from ...ipc.spec.config.engine_spec import EngineSpec


class SupervisorLink(SupervisorChannel):
    """Channel that also owns the messages deferred by `put_off`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: EngineSpec, core_epoch: int) -> None:
        super().__init__(context, spec, spec.identity("core", core_epoch))
        self._put_off: deque[SupervisorToChild] = deque()

    @property
    def has_put_off(self) -> bool:
        """Whether there are deferred messages, which do not wake a poller."""
        return bool(self._put_off)

    def receive(self) -> Iterator[SupervisorToChild]:
        """Yield all received messages, deferred ones first."""
        while self._put_off:
            yield self._put_off.popleft()
        yield from super().receive()

    def put_off(self, generation: int) -> None:
        """Defer all received messages. EngineDead if one of them is Stop, or WorkersDown for the `generation` of
        workers that the core waits for; that one is deferred, too."""
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
