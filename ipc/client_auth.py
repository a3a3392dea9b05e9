"""ZapHandler: authenticates clients by their CURVE key (ZeroMQ's authentication protocol, RFC 27).

ZeroMQ sends a request over an inproc socket during each handshake. The loop of the server answers it, without a thread.
"""

from __future__ import annotations

import contextlib
import logging

import zmq
from zmq.utils import z85

logger = logging.getLogger("tokenloom")

ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"tokenloom"


class ZapHandler:
    """Checker of clients' keys. ZeroMQ sends its requests to `socket`; poll it, then call `answer`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], client_public: str) -> None:
        self._client_key = z85.decode(client_public.encode())
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ADDRESS)

    def answer(self) -> None:
        """Reply to all waiting requests: accept the client key, refuse any other."""
        with contextlib.suppress(zmq.Again):
            while True:
                identity, empty, *request = self.socket.recv_multipart(zmq.NOBLOCK)
                reply = self._authenticate(request)
                self.socket.send_multipart([identity, empty, *reply])

    def _authenticate(self, request: list[bytes]) -> list[bytes]:
        """Make the reply to a request (version, id, domain, address, identity, mechanism, credentials …)."""
        version, request_id, domain, address, _, mechanism, *credentials = request
        if (version, domain, mechanism, credentials) == (b"1.0", DOMAIN, b"CURVE", [self._client_key]):
            return [b"1.0", request_id, b"200", b"OK", b"client", b""]
        logger.warning("a client at %s was refused: it has another key", address.decode(errors="replace"))
        return [b"1.0", request_id, b"400", b"this key is not admitted", b"", b""]
