"""ClientFrames: reads the frames of clients, and replies to those that cannot be read.

Before a frame is decoded, the key of its request or query is written into the ReadingNote. If the frame is malformed,
or handling it meets a bug, the error is sent under the id of that request or query. Of all messages only Hello is
handled here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ....ipc.codec import Decoder
from ....ipc.errors import ErrorInfo, ProtocolError
from ....ipc.messages.base import PROTOCOL_VERSION, Hello, Refused, Unknown
from ....ipc.messages.client import ClientMessage, QueryFailed
from ....ipc.notes.deadly import NONE, REFUSAL, ReadingNote
from ....ipc.process.faults import maybe_fail
from ....ipc.spec.config.engine_spec import EngineSpec
from ...forms.prompts import MAX_REQUEST_ID_CHARACTERS
from .large_frame import LARGE_BYTES, check_large_frame, message_id
from .request_manager import RequestManager
from .request_state import Session
from .session_table import SessionTable

logger = logging.getLogger("tokenloom.frontend")


@dataclass(eq=False)
class ClientFrames:
    """Reader of the frames of clients. `_handle` is called with each message of a client that has sent Hello."""

    _spec: EngineSpec
    _sessions: SessionTable
    _requests: RequestManager
    _counts: Counter[str]  # event counts for the metrics
    _note: ReadingNote
    _monotonic: Callable[[], float]
    _handle: Callable[[Session, ClientMessage], None]
    _decoder: Decoder[ClientMessage] = field(default_factory=lambda: Decoder(ClientMessage))

    def read(self, identity: bytes, frame: bytes | memoryview) -> None:
        """Handle one frame of a client. Does not raise, whatever the frame contains. A PutMedium refers to the frame's
        memory: the bytes of the medium are not copied."""
        session = self._sessions.get(identity)
        if session is not None:
            session.last_seen = self._monotonic()
        found_id = None if session is None else message_id(frame)
        key = NONE if found_id is None else self._note.key_of(identity, repr(found_id).encode())
        if self._note.is_deadly(key):
            self._counts["deadly_requests"] += 1
            self._on_unreadable(identity, session, found_id, REFUSAL)
            return
        before = self._note.begin(key)
        maybe_fail("frontend.read", len(frame))
        try:
            if len(frame) > LARGE_BYTES:
                check_large_frame(frame)
            message = self._decoder.decode(frame)
        except ProtocolError as error:
            self._counts["malformed_client_frames"] += 1
            self._on_unreadable(identity, session, found_id, str(error))
        else:
            if isinstance(message, Hello):
                self._on_hello(identity, session, message)
            elif session is None:
                self._sessions.send(identity, Unknown())
            else:
                self._try(session, message, found_id)
        self._note.end(before)

    def _try(self, session: Session, message: ClientMessage, found_id: str | int | None) -> None:
        """Handle a message. An exception ends only its request or query, not this process and with it all streams."""
        try:
            self._handle(session, message)
        except Exception as error:
            logger.exception("a message of a client met a bug")
            text = f"{type(error).__name__}: {error}"
            request = session.request_by_id.get(found_id) if isinstance(found_id, str) else None
            if request is None:
                self._on_unreadable(session.identity, session, found_id, text)
            else:
                self._requests.end(request, "error", ErrorInfo("internal", text))

    def _on_hello(self, identity: bytes, session: Session | None, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            message = (
                f"the client speaks protocol version {hello.protocol_version}, this engine speaks "
                f"{PROTOCOL_VERSION}: use the client of the engine's release"
            )
            self._sessions.send(identity, Refused(error=ErrorInfo("protocol", message)))
            return
        if session is None:
            self._sessions.add(identity, self._monotonic())
        else:
            session.reset_credits()
            self._sessions.mark(session)
        self._sessions.send(identity, self._spec.welcome)

    def _on_unreadable(self, identity: bytes, session: Session | None, found_id: str | int | None, reason: str) -> None:
        """Reply to a frame that was not read: with an error under the id of its Submit or query, else with Refused."""
        if session is not None and isinstance(found_id, int):
            self._sessions.send(identity, QueryFailed(query_id=found_id, error=ErrorInfo("request", reason)))
        elif session is not None and isinstance(found_id, str) and self._may_refuse(session, found_id):
            self._requests.refuse(session, found_id, ErrorInfo("request", reason))
        else:
            self._sessions.send(identity, Refused(error=ErrorInfo("protocol", reason)))

    def _may_refuse(self, session: Session, request_id: str) -> bool:
        """Return whether a malformed Submit may be ended as a failed request with this id: the id is valid and not
        open."""
        return 0 < len(request_id) <= MAX_REQUEST_ID_CHARACTERS and request_id not in session.request_by_id
