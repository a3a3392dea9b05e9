"""`python -m tokenloom.frontend.server.process`: the frontend's sockets and its loop.

Each turn of the loop receives messages from the cores, the supervisor and clients, completes the jobs of threads, and
sends the results. Messages are handled in requests/frontend.py.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from ...ipc.child import SupervisorChannel, run_child, take_name
from ...ipc.errors import ConfigError
from ...ipc.messages.orders import Order, Ordered
from ...ipc.messages.supervisor import (
    AnswersPings,
    CoreUp,
    Drain,
    Drained,
    HandOver,
    Initialize,
    Loaded,
    Phase,
    Progress,
    Ready,
    ReplicaDown,
    Stop,
    TakeOver,
    WorkersUp,
)
from ...ipc.notes.deadly import ReadingNote
from ...ipc.process.faults import maybe_fail
from ...ipc.process.malloc import return_large_blocks
from ...ipc.sockets.addresses import remove_abandoned, unlink_ipc_address
from ...ipc.sockets.client_auth import DOMAIN, ZapHandler
from ...ipc.sockets.door import Door
from ...ipc.sockets.keys import Keys
from ...ipc.sockets.zmq_sockets import MAX_CLIENT_MESSAGE_BYTES, bind, new_socket, receive_uncopied
from ...ipc.spec.config.engine_spec import EngineSpec, frontend_name, identity_of
from ..listening.client_sender import ClientSender
from .cores.local_cores import NEVER, LocalCores
from .cores.remote_cores import RemoteCores
from .requests.frontend import Frontend
from .requests.media.media_input import MediaInput
from .text.chat_template import NO_MEDIA, ChatTemplate
from .text.tokenizer import Tokenizer

logger = logging.getLogger("tokenloom.frontend")

INTAKE_S = 0.002  # longest time to receive from clients in one turn
# Messages that ZeroMQ queues from one client; it stops reading from that client when the queue is full. After a client
# has left, ZeroMQ keeps the replies to queued messages until all are read. The limit is low, since replies to queries
# may be large.
MAX_UNTAKEN_MESSAGES = 128
HANDSHAKE_MS = 10_000  # longest handshake of a connection; until then a silent connection occupies a descriptor
FAREWELL_MS = 800  # for sending the last messages; with the HTTP server's 2 s it is below the supervisor's limit


class FrontendProcess:
    """Owner of the frontend's sockets and loop. `run` serves until the supervisor sends Stop."""

    _cores: LocalCores | RemoteCores  # both are set in `run`
    _frontend: Frontend

    def __init__(
        self,
        spec: EngineSpec,
        address: str,
        http_addresses: Sequence[str] = (),
        kept_fds: tuple[int, int] = (-1, -1),
        *,
        index: int = 0,
        number: int = 0,
        is_spare: bool = False,
    ) -> None:
        """`address`: where to listen for clients. `http_addresses`: where the supervisor listens for HTTP; if
        empty, there is no HTTP server. `kept_fds`: of the journal, and of the channel to the supervisor. `index`:
        number of this frontend among those of the engine. `number`: how many frontends had this index before.
        `is_spare`: wait, once all is loaded, until it is to take the place of the one before."""
        self._spec, self._address, self._http_addresses, self._kept_fds = spec, address, http_addresses, kept_fds
        self._index, self._number, self._is_spare = index, number, is_spare
        self._identity = identity = identity_of(frontend_name(index), number)  # on the sockets to supervisor and cores
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.supervisor = SupervisorChannel(self._context, spec, identity)
        self._clients = new_socket(self._context, zmq.ROUTER, max_message_bytes=MAX_CLIENT_MESSAGE_BYTES)
        self._sender = ClientSender(self._clients)
        self._clients.setsockopt(zmq.RCVHWM, MAX_UNTAKEN_MESSAGES)
        self._clients.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._zap = self._secure()
        self._door: Door | None = None
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.is_stopping = False
        self._stop_reason = ""
        self._has_begun = self._has_sent_ready = self._has_sent_drained = self._must_hand_over = False

    def _secure(self) -> ZapHandler | None:
        """With --key-file, encrypt the clients' socket and return the handler that admits only the file's client key.
        Without the option, do nothing and return None."""
        if self._spec.config.key_file is None:
            return None
        keys = Keys.load(self._spec.config.key_file)
        keys.secure_server(self._clients, DOMAIN)
        return ZapHandler(self._context, keys.client_public)

    # ── lifetime ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        spec = self._spec
        self._frontend = self._load()
        self.supervisor.counts = self._frontend.counts
        if self._is_spare and not self._wait_to_take_over():
            return
        _tune_garbage_collector()
        self._listen()
        counts = self._frontend.counts
        if spec.remote_cores:  # each core gets a Hello once it is connected
            self._cores = RemoteCores(
                self._context, spec, self._identity, counts, self._wake, self._frontend.on_control_message
            )
        else:
            self._cores = LocalCores(self._context, spec, self._identity, counts)
            self._frontend.connect()
        self._send()
        if self._http_addresses:
            self._serve_http()
        else:
            self._serve()

    def _wait_to_take_over(self) -> bool:
        """Wait for TakeOver. Return False if the engine stops before."""
        if self._http_addresses:
            from .http import server  # noqa: F401, which takes long
        self.supervisor.send(Loaded())
        while not isinstance(message := self.supervisor.wait(), (TakeOver, Stop)):
            pass
        take_name(frontend_name(self._index), self._spec.config.log_level)
        return isinstance(message, TakeOver)

    def _serve(self) -> None:
        poller, polled = zmq.Poller(), tuple[zmq.Socket[bytes], ...]()
        while not self.is_stopping:
            if (sources := self.sockets) != polled:
                poller, polled = zmq.Poller(), sources
                for source in (*sources, self.wakeup_fd):
                    poller.register(source, zmq.POLLIN)
            timeout_s = self.seconds_to_tick(time.monotonic())
            poller.poll(None if timeout_s is None else int(timeout_s * 1000) + 1)
            self.turn()
        self.stop()

    def _serve_http(self) -> None:
        """Run the turns in the event loop of the HTTP server. Only this imports the HTTP server."""
        begun = time.monotonic()
        from .http.server import KeptFds, run_with_http

        self.supervisor.send(Phase(name="http", duration_s=time.monotonic() - begun))
        hosts = [urlsplit(each).hostname or "" for each in self._http_addresses]
        run_with_http(self, self._frontend, self._spec, "".join(hosts), KeptFds(*self._kept_fds), self._index)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        zap = () if self._zap is None else (self._zap.socket,)
        return (self.supervisor.socket, self._clients, *self._cores.sockets, *zap)

    def seconds_to_tick(self, now: float) -> float | None:
        """Return the seconds until the next deadline; None if there is none. `now`: monotonic seconds."""
        wait_s, next_at = self._frontend.seconds_to_tick(now), min(self._cores.next_at, self._sender.next_at)
        return wait_s if next_at == NEVER else min(max(next_at - now, 0.0), NEVER if wait_s is None else wait_s)

    def stop(self) -> None:
        """End all open requests with an error, and send the last messages to clients."""
        reason = f"the engine ended: {self._stop_reason}" if self._stop_reason else "the engine was stopped"
        self._frontend.stop(f"{reason}; start it again and repeat the request")
        self._send()

    def _load(self) -> Frontend:
        spec, begun = self._spec, time.monotonic()
        tokenizer = Tokenizer.load(Path(spec.tokenizer_folder), spec.config.trust_remote_code)
        media = MediaInput.load(spec, tokenizer)
        marker = NO_MEDIA if media is None else media.placeholders.marker
        chat_template = ChatTemplate.of(spec, tokenizer, marker)
        note = ReadingNote(spec.run_directory, self._identity.decode())
        frontend = Frontend(
            spec, tokenizer, chat_template, self._wake, media, note, identity=self._identity, index=self._index
        )
        detail = "none: token ids only" if tokenizer is None else f"{tokenizer.size} tokens"
        self.supervisor.send(Phase(name="tokenizer loaded", duration_s=time.monotonic() - begun, detail=detail))
        begun = time.monotonic()
        frontend.adapters.load_modules()
        if infos := frontend.adapters.infos:
            detail = f"{len(infos)} adapters"
            self.supervisor.send(Phase(name="adapters loaded", duration_s=time.monotonic() - begun, detail=detail))
        return frontend

    def _listen(self) -> None:
        address, begun = self._address, time.monotonic()
        if address.startswith("tcp://") and address.endswith(":0"):
            address = address.removesuffix("0") + "*"
        try:
            self._door = bind(self._clients, address, int(self._spec.config.listen_mode, 8))
        except (zmq.ZMQError, OSError) as error:
            raise ConfigError(
                f"cannot listen on {self._address}: {error.strerror}; choose another --listen address"
            ) from None
        endpoint = _as_given(address, self._clients.getsockopt_string(zmq.LAST_ENDPOINT))
        self.supervisor.send(Phase(name="listen", duration_s=time.monotonic() - begun, detail=endpoint))

    def turn(self) -> None:
        """Run one turn of the loop: receive from all sockets, complete the threads' jobs, handle deadlines, and
        send."""
        if not self._has_begun:
            self._has_begun = True
            self.supervisor.send(AnswersPings())
        maybe_fail("frontend.receive")
        if self._zap is not None:
            self._zap.answer()
        self._receive_from_core()  # first: the supervisor may report the loss of a core that has sent more
        self._receive_from_supervisor()
        has_read_all = self._receive_from_clients()
        self._finish_jobs()
        self._frontend.tick(time.monotonic(), check_leases=has_read_all)
        maybe_fail("frontend.send")
        self._send()
        if not self._has_sent_ready and self._may_serve():
            self._has_sent_ready = True
            self.supervisor.send(Ready())
        if self._frontend.is_drained and not self._has_sent_drained:  # after `_send`, since Stop may follow
            self._has_sent_drained = True
            self.supervisor.send(Drained())
        if self._must_hand_over:
            os._exit(0)  # between two turns, so that no answer is half written

    def _may_serve(self) -> bool:
        """Return whether enough cores have welcomed this frontend to send Ready. A frontend that starts with its engine
        waits for all cores, so that its first requests are spread over all. A replacement needs only one, since others
        may be gone for long; so does a gateway, which after a while needs none (`may_begin`)."""
        needs_all = self._number == 0 and not self._spec.remote_cores
        return self._frontend.is_welcome(to_all=needs_all) or self._cores.may_begin(time.monotonic())

    # ── receive ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _receive_from_supervisor(self) -> None:
        for message in self.supervisor.receive():
            if isinstance(message, HandOver):
                self._must_hand_over = True
            elif isinstance(message, Stop):
                self.is_stopping, self._stop_reason = True, message.reason
            else:
                if isinstance(message, Drain):
                    self._has_sent_drained = False
                elif isinstance(message, Progress):
                    message = self._cores.complete(message)
                elif isinstance(message, Ordered):
                    self._receive_from_core()  # outputs that cores sent before they carried out the order
                self._frontend.on_control_message(message)

    def _receive_from_core(self) -> None:
        for core, message in self._cores.receive(time.monotonic()):
            if isinstance(message, (Progress, ReplicaDown, WorkersUp, CoreUp, Initialize)):  # of a remote core
                self._frontend.on_control_message(message)
            else:
                self._frontend.on_core_message(message, core)

    def _receive_from_clients(self) -> bool:
        """Receive from clients for at most INTAKE_S. Return whether all messages have been read."""
        deadline = time.monotonic() + INTAKE_S
        for identity, frame in receive_uncopied(self._clients):
            self._frontend.on_client_frame(identity, frame)
            if time.monotonic() > deadline:
                return False
        return True

    def _finish_jobs(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakeup_fd)
            self._frontend.on_wakeup()

    def _wake(self) -> None:
        os.eventfd_write(self.wakeup_fd, 1)

    # ── send ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self) -> None:
        """Send all messages of the outbox: those to clients before those to cores, since a lost client adds aborts."""
        outbox = self._frontend.outbox
        for message in outbox.to_supervisor:
            if not (isinstance(message, Order) and self._cores.take_order(message)):
                self.supervisor.send(message)
        outbox.to_supervisor.clear()
        for identity, frame in outbox.to_clients:
            if (lost := self._sender.send(identity, frame)) is not None:
                self._frontend.on_client_lost(identity, *lost)
        outbox.to_clients.clear()
        self._sender.tick(time.monotonic())
        self._cores.send(outbox.to_cores)

    def close(self) -> None:
        if hasattr(self, "_cores"):  # it is missing if the start has failed
            self._cores.close()
        if self._door is not None:
            self._door.close()
        self._context.destroy(linger=FAREWELL_MS)


def _as_given(address: str, endpoint: str) -> str:
    """Return `address` with the port that ZeroMQ has bound. ZeroMQ's `endpoint` is not returned as it is for tcp, since
    it may show the host as [::ffff:127.0.0.1]."""
    if not address.startswith("tcp://"):
        return endpoint
    host, port = address.rpartition(":")[0], endpoint.rpartition(":")[2]
    return f"{'tcp://0.0.0.0' if host == 'tcp://*' else host}:{port}"


def _tune_garbage_collector() -> None:
    """Freeze the loaded objects and make full collections rare.

    Requests leave no reference cycles, not even refused ones: an error that is kept has no traceback, and no frame in a
    traceback refers to its error. With 16,384 open answers a full collection blocks the loop for 0.1 to 0.2 s; by
    default there is one each time the number of objects has grown by a quarter.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(1000, 20, 50)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tokenloom.frontend.server.process")
    parser.add_argument("--index", type=int, default=0, help="of the frontend among those of the engine")
    parser.add_argument("--number", type=int, default=0, help="of frontends with this index before it")
    parser.add_argument("--address", help="where to listen, if not the spec's client address")
    parser.add_argument("--http-address", action="append", default=[], help="where the supervisor listens for HTTP")
    parser.add_argument("--journal-fd", type=int, default=-1, help="memory for the HTTP connections")
    parser.add_argument("--spare", action="store_true", help="wait until it is to take the place of the one before")
    parser.add_argument("--keeper-fd", type=int, default=-1, help="channel to the supervisor, which keeps them")
    arguments = parser.parse_args()
    return_large_blocks()

    def new_child(spec: EngineSpec) -> FrontendProcess:
        index, number = arguments.index, arguments.number
        address = arguments.address or spec.endpoints.clients_of(index)
        kept_fds = (arguments.journal_fd, arguments.keeper_fd)
        return FrontendProcess(
            spec, address, arguments.http_address, kept_fds, index=index, number=number, is_spare=arguments.spare
        )

    name = frontend_name(arguments.index)
    return run_child(f"next {name}" if arguments.spare else name, new_child, before_exit=_remove_files)


def _remove_files(spec: EngineSpec) -> None:
    """Remove the files that a killed supervisor has left: the run directory, and sockets outside of it."""
    remove_abandoned(Path(spec.run_directory))
    addresses = [address for address in spec.client_addresses if address.startswith("ipc://")]
    addresses += [f"ipc://{spec.config.uds}"] if spec.config.uds is not None else []
    for address in addresses:
        with contextlib.suppress(OSError):
            unlink_ipc_address(address)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a normal exit would wait for threads that tokenize
