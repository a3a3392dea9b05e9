"""BlobThread: a thread of the supervisor that serves the head's adapters and media to the ranks on other hosts.

Hashing and reading release Python's lock, so that the supervisor's loop is not delayed.
"""

from __future__ import annotations

import threading
import time

import zmq

from ....ipc.blobs.channel import LEASE_S, BlobServer
from ....ipc.blobs.engine_blobs import EngineBlobs
from ....ipc.sockets.client_auth import GROUP, ZapHandler
from ....ipc.sockets.endpoints import tcp_address
from ....ipc.sockets.keys import Keys
from ....ipc.sockets.zmq_sockets import new_socket
from ....ipc.spec.config.engine_spec import EngineSpec

STOP = b"stop"


class BlobThread:
    """Owner of the thread and its sockets. `address`: where ranks on other hosts connect."""

    def __init__(self, spec: EngineSpec, keys: Keys) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zap = ZapHandler(self._context, keys.client_public, GROUP)
        self._socket = new_socket(self._context, zmq.ROUTER)
        self.address = keys.listen(self._socket, GROUP, tcp_address(spec.host_address, "*"))
        self._stopper = self._context.socket(zmq.PAIR)
        self._stopper.bind("inproc://stop")
        self._server = BlobServer(EngineBlobs(spec))
        self._thread = threading.Thread(target=self._run, name="blobs", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        with self._context.socket(zmq.PAIR) as stop:
            stop.connect("inproc://stop")
            for socket in (stop, self._zap.socket, self._socket):
                poller.register(socket, zmq.POLLIN)
            while not stop.poll(0):
                poller.poll(int(LEASE_S * 1000))
                self._zap.answer()
                now = time.monotonic()
                self._server.answer(self._socket, now)
                self._server.expire(now)

    def close(self) -> None:
        self._stopper.send(STOP)
        self._thread.join()
        self._context.destroy(linger=0)
