"""RedisNodes: the server at a URL, or the nodes of its cluster: connections to them, and which node holds a key.

redis-py connects, authenticates, does TLS and keeps the map of a cluster's slots; everything else is in resp.py. All
failures of the network and the servers are OSErrors.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from redis import Connection as TcpConnection
from redis import RedisCluster, RedisError
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from ....ipc.errors import ConfigError, Overloaded
from ....ipc.shortages.threads import Threads
from .resp import Connection, command

T = TypeVar("T")
_parse_url: Any = parse_url  # untyped in redis-py

CONNECT_TIMEOUT_S = 1.0
_REDIS_SCHEMES = {"valkey": "redis", "valkeys": "rediss"}


class Node(NamedTuple):
    host: str
    port: int


HOME = Node("", 0)  # the server in the URL


class RedisNodes:
    """The nodes behind a URL: one server, until `learn` finds a cluster."""

    def __init__(self, url: str) -> None:
        """Parse the URL, without connecting. ConfigError if it is invalid."""
        scheme, _, rest = url.partition("://")
        self._url = f"{_REDIS_SCHEMES.get(scheme, scheme)}://{rest}"
        parts = urlsplit(url)
        self.place = f"{scheme}://{(parts.netloc or parts.path).rpartition('@')[2]}"  # without the password
        try:
            self._options: dict[str, Any] = _parse_url(self._url)
        except ValueError as error:
            raise ConfigError(f"--kv-remote {self.place}: {error}") from None
        self._connection_type: Any = self._options.pop("connection_class", TcpConnection)
        self._cluster: Any = None  # a RedisCluster
        self.is_known = False  # whether the nodes are known; False: `learn` reads them again
        self._connector = Threads(1, "connect")  # resolving a name may take longer than a caller may wait

    def connect(self, node: Node, deadline: float) -> Connection:
        """Connect to a node, authenticate and return the connection."""
        return self._run(functools.partial(self._connect, node), _close, deadline)

    def learn(self, deadline: float) -> None:
        """Find out whether the server belongs to a cluster and which node has which slots, unless that is known."""
        if not self.is_known:
            self._run(self._discover, None, deadline)

    def node_of(self, name: bytes) -> Node:
        """Return the node that holds the value with this name."""
        if self._cluster is None:
            return HOME
        with _as_os_errors():
            return _node(self._cluster.get_node_from_key(name.decode()))

    def nodes(self) -> list[Node]:
        """Return every node that holds keys."""
        if self._cluster is None:
            return [HOME]
        with _as_os_errors():
            return [_node(each) for each in self._cluster.get_primaries()]

    def doubt(self) -> None:
        """Let the next `learn` read the map of a cluster again: after a failure, another node may have taken over."""
        if self._cluster is not None:
            self.is_known = False

    def close(self) -> None:
        self._connector.shutdown(wait=False, cancel_futures=True)
        if self._cluster is not None:
            with contextlib.suppress(RedisError, OSError):
                self._cluster.close()

    def _run(self, function: Callable[[], T], discard: Callable[[Future[T]], None] | None, deadline: float) -> T:
        """Return the result of a function run in the connecting thread, or raise its error. ConnectionError if no
        thread can be started, TimeoutError after the deadline; then `discard`, if given, gets the function's future
        when it completes, unless it had not begun."""
        try:
            future = self._connector.submit(function)
        except Overloaded as error:
            raise ConnectionError(str(error)) from None
        try:
            return future.result(max(deadline - time.monotonic(), 0))
        except (TimeoutError, CancelledError):
            if not future.cancel() and discard is not None:
                future.add_done_callback(discard)
            raise TimeoutError("no connection in time") from None

    def _connect(self, node: Node) -> Connection:
        options = {**self._options, **_limits()}
        if node != HOME:
            options.update(host=node.host, port=node.port)
        with _as_os_errors():
            link = self._connection_type(**options)
            link.connect()
        return Connection(link._sock, owner=link)

    def _discover(self) -> None:
        if self._cluster is not None:
            with _as_os_errors():
                self._cluster.nodes_manager.initialize()
        else:
            connection, deadline = self._connect(HOME), time.monotonic() + CONNECT_TIMEOUT_S
            try:
                connection.send([command(b"INFO", b"cluster")], deadline)
                answer = connection.receive(deadline)
            finally:
                connection.close()
            if isinstance(answer, bytes) and b"cluster_enabled:1" in answer:
                with _as_os_errors():
                    self._cluster = RedisCluster.from_url(self._url, **_limits())
        self.is_known = True


class Links:
    """Connections to the nodes, made when they are first needed. One call at a time uses them."""

    def __init__(self, nodes: RedisNodes) -> None:
        self._nodes = nodes
        self._connections: dict[Node, Connection] = {}

    def connection(self, node: Node, deadline: float) -> Connection:
        """Return the connection to a node; a new one if there is none, the server has closed it, or something
        unexpected has arrived on it."""
        connection = self._connections.get(node)
        if connection is None or not connection.is_usable():
            if connection is not None:
                connection.close()
            connection = self._connections[node] = self._nodes.connect(node, deadline)
        return connection

    def close(self) -> None:
        """Close all connections, even if replies are outstanding."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


def _node(node: Any) -> Node:
    return Node(str(node.host), int(node.port))


def _close(future: Future[Connection]) -> None:
    """Close a connection that was made after the deadline."""
    if not future.cancelled() and future.exception() is None:
        future.result().close()


def _limits() -> dict[str, Any]:
    return {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # besides RedisError, redis-py raises ValueError, IndexError and others
        raise ConnectionError(str(error) or type(error).__name__) from None
