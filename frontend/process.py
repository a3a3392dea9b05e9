"""`python -m tokenloom.frontend.process`: the frontend's sockets and its loop.

One loop: wait for anything, take in what clients, core, supervisor and threads say, end the turn, send what is due.
Everything that decides lives in requests/frontend.py.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import zmq

from ..ipc.addresses import unlink_ipc_address
from ..ipc.codec import Decoder, encode
from ..ipc.config.engine_spec import EngineSpec
from ..ipc.errors import ConfigError, ProtocolError, error_info
from ..ipc.keys import Keys
from ..ipc.messages.base import Ping, Pong
from ..ipc.messages.core import CoreToFrontend
from ..ipc.messages.supervisor import (
    ChildToSupervisor,
    Drained,
    Failed,
    Phase,
    Ready,
    SetLogLevel,
    Stop,
    SupervisorToChild,
)
from ..ipc.process import log
from ..ipc.process.faults import maybe_fail
from ..ipc.process.lifeline import start_lifeline
from ..ipc.process.malloc import return_large_blocks
from ..ipc.process.signals import ignore_group_signals
from ..ipc.process.title import set_title
from ..ipc.sockets import MAX_CLIENT_MESSAGE_BYTES, new_socket, receive
from .listening.open_requests import OpenRequests, path_of
from .requests.client_auth import DOMAIN, ZapHandler
from .requests.frontend import Frontend
from .text.chat_template import ChatTemplate
from .text.tokenizer import Tokenizer

T = TypeVar("T")

logger = logging.getLogger("tokenloom.frontend")

INTAKE_S = 0.002  # longest intake from clients in one turn
MAX_UNREAD_MESSAGES = 1 << 17  # to one client, beyond what the kernel buffers: one Accepted for each open request
MAX_UNTAKEN_MESSAGES = 1024  # of one client; beyond, ZeroMQ stops reading from it until the loop has caught up
FAREWELL_MS = 800  # how long the last messages may take; with the HTTP server's 2 s less than the supervisor waits


class FrontendProcess:
    """Owns the sockets; `run` serves until the supervisor says Stop."""

    def __init__(self, spec: EngineSpec, identity: bytes, address: str, http_fds: Sequence[int] = ()) -> None:
        """`identity` names this frontend to supervisor and core; `address` is where clients find it, and `http_fds`
        are inherited descriptors of sockets that listen for HTTP clients."""
        self._spec, self._identity, self._address, self._http_fds = spec, identity, address, http_fds
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = new_socket(self._context, zmq.DEALER, identity=identity)
        self._control.connect(spec.address("control"))
        self._clients = new_socket(self._context, zmq.ROUTER, max_message_bytes=MAX_CLIENT_MESSAGE_BYTES)
        self._clients.setsockopt(zmq.SNDHWM, MAX_UNREAD_MESSAGES)
        self._clients.setsockopt(zmq.RCVHWM, MAX_UNTAKEN_MESSAGES)
        self._zap = self._secure()
        self._core = new_socket(self._context, zmq.DEALER, identity=identity)
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._from_core: Decoder[CoreToFrontend] = Decoder(CoreToFrontend)
        self._from_supervisor: Decoder[SupervisorToChild] = Decoder(SupervisorToChild)
        self.is_stopping = False
        self._stop_reason = ""
        self._has_told_ready = self._has_told_drained = False

    def _secure(self) -> ZapHandler | None:
        """Encrypt the clients' socket and admit only the client key of --key-file, if there is one."""
        if self._spec.config.key_file is None:
            return None
        keys = Keys.load(self._spec.config.key_file)
        keys.secure_server(self._clients, DOMAIN)
        return ZapHandler(self._context, keys.client_public)

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        spec = self._spec
        self._tell(spec.hello)
        self._frontend = self._load()
        _collect_seldom()
        self._listen()
        self._core.connect(spec.address("core"))
        self._frontend.connect()
        self._send()
        if self._http_fds:
            self._serve_http()
        else:
            self._serve()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (*self.sockets, self.wakeup_fd):
            poller.register(source, zmq.POLLIN)
        while not self.is_stopping:
            timeout_s = self.seconds_to_tick(time.monotonic())
            poller.poll(None if timeout_s is None else int(timeout_s * 1000) + 1)
            self.turn()
        self.stop()

    def _serve_http(self) -> None:
        """The same turns, on the event loop of the HTTP server, which is imported only here."""
        begun = time.monotonic()
        from .http.server import run_with_http

        open_requests = OpenRequests(path_of(self._spec.run_directory, self._identity.decode()))
        self._tell(Phase(name="http", duration_s=time.monotonic() - begun))
        run_with_http(self, self._frontend, self._spec, self._http_fds, open_requests)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        zap = () if self._zap is None else (self._zap.socket,)
        return (self._control, self._clients, self._core, *zap)

    def seconds_to_tick(self, now: float) -> float | None:
        """How long nothing may happen; `now` in monotonic seconds."""
        return self._frontend.seconds_to_tick(now)

    def stop(self) -> None:
        """Tell everybody that this is the end."""
        why = f"the engine ended: {self._stop_reason}" if self._stop_reason else "the engine was stopped"
        self._frontend.stop(f"{why}; start it again and repeat the request")
        self._send()

    def _load(self) -> Frontend:
        spec, begun = self._spec, time.monotonic()
        folder = Path(spec.tokenizer_folder)
        tokenizer = Tokenizer.load(folder, spec.config.trust_remote_code)
        chat_template = ChatTemplate.load(folder, tokenizer, spec.config)
        frontend = Frontend(spec, tokenizer, chat_template, self._wake)
        detail = "none: token ids only" if tokenizer is None else f"{tokenizer.size} tokens"
        self._tell(Phase(name="tokenizer loaded", duration_s=time.monotonic() - begun, detail=detail))
        return frontend

    def _listen(self) -> None:
        address, begun = self._address, time.monotonic()
        if address.startswith("tcp://") and address.endswith(":0"):
            address = address.removesuffix("0") + "*"
        try:
            self._clients.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot listen on {self._address}: {error.strerror}; choose another --listen address"
            ) from None
        endpoint = _as_given(address, self._clients.getsockopt_string(zmq.LAST_ENDPOINT))
        self._tell(Phase(name="listen", duration_s=time.monotonic() - begun, detail=endpoint))

    def turn(self) -> None:
        """One turn of the loop: intake from all sides, then everything that is due."""
        maybe_fail("frontend.receive")
        if self._zap is not None:
            self._zap.answer()
        self._take_orders()
        self._take_outputs()
        has_read_all = self._take_requests()
        self._take_background()
        self._frontend.tick(time.monotonic(), check_leases=has_read_all)
        maybe_fail("frontend.send")
        self._send()
        if self._frontend.is_ready and not self._has_told_ready:
            self._has_told_ready = True
            self._tell(Ready())
        if self._frontend.is_drained and not self._has_told_drained:  # after all has been sent: Stop may follow
            self._has_told_drained = True
            self._tell(Drained())

    # ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_orders(self) -> None:
        for message in self._decoded(self._control, self._from_supervisor, "supervisor"):
            if isinstance(message, Stop):
                self.is_stopping, self._stop_reason = True, message.reason
            elif isinstance(message, Ping):
                self._tell(Pong())
            else:
                if isinstance(message, SetLogLevel):
                    log.set_level(message.level)
                self._frontend.on_control_message(message)

    def _take_outputs(self) -> None:
        for message in self._decoded(self._core, self._from_core, "core"):
            self._frontend.on_core_message(message)

    def _decoded(self, socket: zmq.Socket[bytes], decoder: Decoder[T], peer: str) -> Iterator[T]:
        for (frame,) in receive(socket, num_parts=1):
            try:
                message = decoder.decode(frame)
            except ProtocolError as error:
                self._frontend.count_malformed(peer, error)
                continue
            yield message

    def _take_requests(self) -> bool:
        """Whether nothing is left to read."""
        deadline = time.monotonic() + INTAKE_S
        for identity, frame in receive(self._clients, num_parts=2):
            self._frontend.on_client_frame(identity, frame)
            if time.monotonic() > deadline:
                return False
        return True

    def _take_background(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakeup_fd)
            self._frontend.on_wakeup()

    def _wake(self) -> None:
        os.eventfd_write(self.wakeup_fd, 1)

    # ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self) -> None:
        """Clients first: one that is gone leaves requests to abort in the core."""
        outbox = self._frontend.outbox
        for identity, frame in outbox.to_clients:
            if not self._send_to_client(identity, frame):
                self._frontend.on_client_gone(identity)
        outbox.to_clients.clear()
        for message in outbox.to_core:
            self._core.send(encode(message))
        outbox.to_core.clear()
        for order in outbox.to_supervisor:
            self._tell(order)
        outbox.to_supervisor.clear()

    def _send_to_client(self, identity: bytes, frame: bytes) -> bool:
        """False when there is no such client any more, or one that has not read MAX_UNREAD_MESSAGES."""
        try:
            self._clients.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def _tell(self, message: ChildToSupervisor) -> None:
        self._control.send(encode(message))

    def fail(self, error: Exception) -> None:
        self._tell(Failed(error=error_info(error)))

    def close(self) -> None:
        self._core.close(linger=0)  # it has been stopped too
        self._context.destroy(linger=FAREWELL_MS)


def _as_given(address: str, endpoint: str) -> str:
    """`address` with the port that ZeroMQ chose; its own spelling of a host is [::ffff:127.0.0.1]."""
    if not address.startswith("tcp://"):
        return endpoint
    host, port = address.rpartition(":")[0], endpoint.rpartition(":")[2]
    return f"{'tcp://0.0.0.0' if host == 'tcp://*' else host}:{port}"


def _collect_seldom() -> None:
    """Have the garbage collector look never again at what has been loaded, and seldom at all that lives. Requests hold
    no cycles, so that there is little for it to find; with 16,384 answers open a look at all of them holds up the loop
    for 0.1 to 0.2 s, and by default there is one whenever their number has grown by a quarter."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(1000, 20, 50)


def main() -> int:
    ignore_group_signals()
    parser = argparse.ArgumentParser(prog="tokenloom.frontend.process")
    parser.add_argument("--identity", default="frontend-0")
    parser.add_argument("--address", help="where to listen, if not the spec's client address")
    parser.add_argument("--http-fd", type=int, action="append", default=[], help="a socket that listens for HTTP")
    arguments = parser.parse_args()
    spec = EngineSpec.from_environment()
    set_title("tokenloom frontend")
    return_large_blocks()
    start_lifeline(lambda: _remove_files(spec))
    log.configure("frontend", spec.config.log_level)
    address = arguments.address or spec.client_address
    process = FrontendProcess(spec, arguments.identity.encode(), address, arguments.http_fd)
    try:
        process.run()
        code = 0
    except ConfigError as error:
        process.fail(error)
        code = 2
    except Exception as error:
        logger.exception("the frontend failed")
        process.fail(error)
        code = 1
    process.close()
    return code


def _remove_files(spec: EngineSpec) -> None:
    """The supervisor is dead: whoever notices removes what it would have removed."""
    shutil.rmtree(spec.run_directory, ignore_errors=True)
    named = [spec.client_address] if spec.client_address.startswith("ipc://") else []
    named += [f"ipc://{spec.config.uds}"] if spec.config.uds is not None else []
    for address in named:
        with contextlib.suppress(OSError):
            unlink_ipc_address(address)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a text that is still being tokenized in a thread would hold up a plain exit
