"""A TCP proxy between a source and its server: it cuts, withholds and stops the bytes that pass."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

Filter = Callable[[bytes], Iterator[bytes]]


def in_pieces(size: int) -> Filter:
    """Return a filter that cuts data into pieces of `size` bytes."""

    def cut(data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), size):
            yield data[start : start + size]

    return cut


def whole(data: bytes) -> Iterator[bytes]:
    yield data


class _Listener:
    """Accepts connections on a port of its own, and closes them at its end."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def close(self) -> None:
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        raise NotImplementedError


class Proxy(_Listener):
    """Forwards connections to `target`. `to_server` and `to_client` filter the bytes of each direction; while they
    block, the direction of that connection stands still."""

    def __init__(self, target: tuple[str, int], to_server: Filter = whole, to_client: Filter = whole) -> None:
        self._target, self._to_server, self._to_client = target, to_server, to_client
        super().__init__()

    def _connect(self, client: socket.socket) -> None:
        server = socket.create_connection(self._target)
        self._sockets.append(server)
        for source, sink, rule in ((client, server, self._to_server), (server, client, self._to_client)):
            sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._forward, args=(source, sink, rule), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, rule: Filter) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                for piece in rule(data):
                    sink.sendall(piece)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


class ScriptedServer(_Listener):
    """A server that answers whatever comes with the same bytes, once per received chunk."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        super().__init__()

    def _connect(self, client: socket.socket) -> None:
        threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Greet as Redis does, with +OK for each command of the connection's set-up, then send the answer."""
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                num_setup = data.count(b"\r\nCLIENT\r\n") + data.count(b"\r\nINFO\r\n")
                client.sendall(b"+OK\r\n" * num_setup if num_setup else self._answer)
