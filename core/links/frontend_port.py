"""FrontendPort: the socket to the frontends, and a number for each.

Requests, aborts and controls come in, output columns go out. Never waits for a frontend: if one is gone its requests
end, and it submits them again when it is back.
"""

from __future__ import annotations

import logging

import zmq

from ...ipc.channel import Channel
from ...ipc.codec import num_ids
from ...ipc.config.engine_spec import EngineSpec
from ...ipc.errors import ProtocolError, error_info
from ...ipc.messages.base import PROTOCOL_VERSION, Hello, Ping, Pong, Refused, Unknown, Welcome
from ...ipc.messages.core import AbortRequests, CoreToFrontend, EngineControl, EngineCoreRequest, FrontendToCore
from ...ipc.messages.touched import TouchedAnswers
from ...ipc.process.faults import maybe_fail
from ...ipc.sockets import new_socket
from ..engine import EngineCore
from ..request import Request
from .control_queue import ControlQueue

logger = logging.getLogger("tokenloom.core")

INTAKE_S = 0.001  # longest time to receive between two steps


class FrontendPort:
    """Socket to the frontends, bound at once: they may connect at any time. `frontend_id` numbers those that have sent
    Hello."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: EngineSpec, touched: TouchedAnswers) -> None:
        socket = new_socket(context, zmq.ROUTER)
        socket.bind(spec.endpoints.core)
        self._channel: Channel[FrontendToCore, CoreToFrontend] = Channel(socket, FrontendToCore, "frontends")
        self._spec, self._touched = spec, touched
        self._frontend_by_identity: dict[bytes, int] = {}
        self._identity_by_frontend: dict[int, bytes] = {}
        self._num_greeted = 0

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._channel.socket

    def receive(self, engine: EngineCore, controls: ControlQueue) -> None:
        """Handle received messages, for at most INTAKE_S."""
        for identity, message in self._channel.receive_from(INTAKE_S):
            try:
                self._on_message(identity, message, engine, controls)
            except ProtocolError as error:
                self._channel.count_malformed(error)

    def _on_message(self, identity: bytes, message: FrontendToCore, engine: EngineCore, controls: ControlQueue) -> None:
        frontend_id = self._frontend_by_identity.get(identity)
        if isinstance(message, Hello):
            self._greet(identity, message, engine)
        elif frontend_id is None:
            self._channel.send_to(identity, Unknown())
        elif isinstance(message, EngineCoreRequest):
            self._touched.begin_adding(identity, message.children[0].key)
            maybe_fail("core.add", num_ids(message.prompt_token_ids))
            handle(frontend_id, message, engine, controls)
            self._touched.end_adding()
        elif (reply := handle(frontend_id, message, engine, controls)) is not None:
            self._channel.send_to(identity, reply)

    def _greet(self, identity: bytes, hello: Hello, engine: EngineCore) -> None:
        mine = (PROTOCOL_VERSION, self._spec.run_id, self._spec.fingerprint)
        if (hello.protocol_version, hello.run_id, hello.fingerprint) != mine:
            error = ProtocolError(
                f"a frontend of protocol {hello.protocol_version}, run {hello.run_id} spoke to a core of protocol "
                f"{PROTOCOL_VERSION}, run {self._spec.run_id}"
            )
            self._channel.send_to(identity, Refused(error=error_info(error)))
            return
        if (known := self._frontend_by_identity.get(identity)) is not None:
            engine.drop_frontend(known)  # it has reconnected and submits its requests again
        else:
            self._frontend_by_identity[identity] = self._num_greeted
            self._identity_by_frontend[self._num_greeted] = identity
            self._num_greeted += 1
        self._channel.send_to(identity, Welcome(protocol_version=PROTOCOL_VERSION, run_id=self._spec.run_id))

    def note_admission(self, request: Request) -> None:
        """Note that a request is about to be admitted to a step, until `TouchedAnswers.forget_admitted`."""
        if (identity := self._identity_by_frontend.get(request.frontend_id)) is not None:
            self._touched.admit(identity, request.key)
        maybe_fail("core.admit", request.num_tokens)

    def send_outputs(self, engine: EngineCore) -> None:
        """Send the outputs of the engine; the requests of a frontend that is gone end."""
        for frontend_id, outputs in engine.take_outputs():
            identity = self._identity_by_frontend.get(frontend_id)
            if identity is not None and not self._channel.send_to(identity, outputs):
                self.lose(identity, engine)

    def answer(self, frontend_id: int, message: CoreToFrontend) -> None:
        """Send a message to a frontend, if it is still there."""
        if (identity := self._identity_by_frontend.get(frontend_id)) is not None:
            self._channel.send_to(identity, message)

    def lose(self, identity: bytes, engine: EngineCore) -> None:
        """Forget a frontend that is gone, and end its requests."""
        frontend_id = self._frontend_by_identity.pop(identity, None)
        if frontend_id is not None:
            del self._identity_by_frontend[frontend_id]
            logger.warning("a frontend is gone: its %d requests end", engine.drop_frontend(frontend_id))


def handle(frontend_id: int, message: FrontendToCore, engine: EngineCore, controls: ControlQueue) -> Pong | None:
    """Apply a message of a frontend that has sent Hello. Returns the reply, if there is one at once."""
    if isinstance(message, EngineCoreRequest):
        engine.add_request(frontend_id, message)
    elif isinstance(message, AbortRequests):
        engine.abort(frontend_id, message.keys)
    elif isinstance(message, EngineControl):
        controls.add(frontend_id, message)
    elif isinstance(message, Ping):
        return Pong()
    return None
