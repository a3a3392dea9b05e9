"""ZapHandler: authenticates peers by their CURVE key (ZeroMQ's authentication protocol, RFC 27).

ZeroMQ sends a request over an inproc socket during each handshake. The server's own loop answers it, without a thread.
Each domain is a group of peers with its own keys, which sockets of the other domains refuse.
"""

from __future__ import annotations

import contextlib
import logging

import zmq
from zmq.utils import z85

from ..process.log import is_worth_a_line

logger = logging.getLogger("tokenloom")

ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"tokenloom"  # clients, and engines that exchange KV blocks; keys in the file of --key-file
HOSTS = b"tokenloom-hosts"  # the head and the agents of its hosts; keys in the file of --hosts-key-file
CORES = b"tokenloom-cores"  # gateways and the cores of engines; keys in the same file
GROUP = b"tokenloom-group"  # the head and the ranks on other hosts; keys that are new for each engine


class ZapHandler:
    """Checker of peers' keys. ZeroMQ sends its requests to `socket`; poll it, then call `answer`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], client_public: str, domain: bytes = DOMAIN) -> None:
        """`client_public`: the only client key that is accepted in `domain`."""
        self._key_by_domain: dict[bytes, bytes] = {}
        self._num_refused = 0
        self.admit(domain, client_public)
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ADDRESS)

    def admit(self, domain: bytes, client_public: str) -> None:
        """Accept `client_public`, and no other key, in `domain`."""
        self._key_by_domain[domain] = z85.decode(client_public.encode())

    def answer(self) -> None:
        """Reply to all waiting requests: accept the domain's client key, and refuse any other."""
        with contextlib.suppress(zmq.Again):
            while True:
                identity, empty, *request = self.socket.recv_multipart(zmq.NOBLOCK)
                reply = self._authenticate(request)
                self.socket.send_multipart([identity, empty, *reply])

    def _authenticate(self, request: list[bytes]) -> list[bytes]:
        """Return the reply to a request (version, id, domain, address, identity, mechanism, credentials …)."""
        version, request_id, domain, address, _, mechanism, *credentials = request
        known = self._key_by_domain.get(domain)
        if known is not None and (version, mechanism, credentials) == (b"1.0", b"CURVE", [known]):
            return [b"1.0", request_id, b"200", b"OK", b"client", b""]
        self._num_refused += 1
        if is_worth_a_line(self._num_refused):
            place, count = address.decode(errors="replace"), self._num_refused
            logger.warning("a client at %s was refused: it has another key (refusal %d)", place, count)
        return [b"1.0", request_id, b"400", b"this key is not admitted", b"", b""]
