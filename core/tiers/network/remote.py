"""RemoteSource: blocks in Redis or Valkey, one server or a cluster, shared by all engines with the same namespace.

The value of `kv:<namespace, 16 hex digits>:<key, hex>` is an object in sealed form. A lookup counts a value of another
length as missing, and a store replaces it; a load deletes a value that fails its check. Each call uses connections of
its own while it runs, so no call waits for the replies of another; only new connections are made one at a time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from ....ipc.errors import Overloaded
from ....ipc.messages.tier import SourceName, SourceState
from ....ipc.shortages.threads import start_thread
from ..object_format import HEADER_BYTES
from ..source import Item, Namespace, num_within
from .breaker import Breaker
from .redis_nodes import Links, Node, RedisNodes
from .resp import Connection, Reply, ServerError, command
from .sealed_format import SealedFormat
from .state_counter import StateCounter

logger = logging.getLogger("tokenloom.tiers")

FIRST_LOOKUPS, MOST_LOOKUPS = 8, 64  # keys in one round trip, first and at most: most lookups miss early
AHEAD_BYTES = 1 << 20  # values requested ahead on one connection; with 16 MiB Redis takes twice the time
OPEN_S, DELETE_S, CLEAR_S = 3.0, 1.0, 60.0
STORE_S, STORE_BYTES_PER_S = 5.0, 1e6  # a slower store counts as failed
REFUSED_S = 10.0  # pause of stores after the server has refused one: it is full, or a replica
_ELSEWHERE = ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN")
_REFUSALS = ("OOM", "READONLY", "MISCONF", "NOPERM")

Action = Callable[[SealedFormat, Links], None]


class RemoteSource:
    """Source for --kv-remote."""

    name: SourceName = "remote"
    num_loaders = 3
    load_batch = 16
    store_batch = 16

    def __init__(self, url: str, on_change: Callable[[], None], new_breaker: Callable[[], Breaker] = Breaker) -> None:
        """Parse the URL, without connecting. ConfigError if it is invalid."""
        self._nodes = RedisNodes(url)
        self._on_change = on_change
        self._reads, self._writes = new_breaker(), new_breaker()  # separate, so that slow stores do not stop loads
        self._counter = StateCounter(self.name)
        self._form: SealedFormat | None = None
        self._lock = threading.Lock()
        self._idle: list[Links] = []  # not used by a call; the one used last is at the end
        self._stores_from = 0.0  # time until which no stores are sent, monotonic s
        self._logged: set[str] = set()  # codes of error replies that were logged

    def open(self, namespace: Namespace) -> None:
        self._form = SealedFormat(namespace)
        deadline = time.monotonic() + OPEN_S

        def connect(_: SealedFormat, links: Links) -> None:
            for node in self._nodes.nodes():
                links.connection(node, deadline)

        with contextlib.suppress(Overloaded):  # otherwise the first call connects
            start_thread("remote", self._try, "find", connect, deadline)

    def find(self, keys: Sequence[bytes], num_bytes: int, deadline: float) -> int:
        num_found = 0

        def find(form: SealedFormat, links: Links) -> None:
            """Look up longer and longer batches until a key is missing. STRLEN, like EXISTS, does not read the value;
            it also detects a value of a wrong type or length."""
            nonlocal num_found
            size = FIRST_LOOKUPS
            while num_found < len(keys):
                names = [_name(form, key) for key in keys[num_found : num_found + size]]
                for length in self._ask(links, b"STRLEN", names, deadline):
                    if length != form.num_bytes(num_bytes):
                        return
                    num_found += 1
                size = min(2 * size, MOST_LOOKUPS)

        return num_found if self._try("find", find, deadline) else 0

    def may_have(self, keys: Sequence[bytes], num_bytes: int, deadline: float) -> list[bool]:
        found: list[bool] = []

        def look(form: SealedFormat, links: Links) -> None:
            for start in range(0, len(keys), MOST_LOOKUPS):
                names = [_name(form, key) for key in keys[start : start + MOST_LOOKUPS]]
                lengths = self._ask(links, b"STRLEN", names, deadline)
                found.extend(length == form.num_bytes(num_bytes) for length in lengths)

        return found if self._try("find", look, deadline) else [False] * len(keys)

    def load(self, items: Sequence[Item], deadline: float, on_loaded: Callable[[int, bool], None]) -> None:
        started, waiting = time.monotonic(), dict.fromkeys(range(len(items)))

        def report(index: int, is_good: bool) -> None:
            del waiting[index]
            on_loaded(index, is_good)

        def load(form: SealedFormat, links: Links) -> None:
            names = [_name(form, item.key) for item in items]
            bad_names: list[bytes] = []
            try:
                for node, indexes in self._by_node(names, waiting):
                    bad_names += self._receive(links.connection(node, deadline), form, items, indexes, deadline, report)
            finally:
                self._counter.add(read_s=time.monotonic() - started)
            self._ask(links, b"DEL", bad_names, time.monotonic() + DELETE_S)

        self._try("load", load, deadline)
        for index in waiting:
            on_loaded(index, False)

    def store(self, items: Sequence[Item]) -> list[bool]:
        started, is_stored = time.monotonic(), [False] * len(items)
        deadline = started + STORE_S + sum(len(item.slot) for item in items) / STORE_BYTES_PER_S

        def store(form: SealedFormat, links: Links) -> None:
            names = [_name(form, item.key) for item in items]
            sizes = [form.num_bytes(len(item.slot)) for item in items]
            for index, length in enumerate(self._ask(links, b"STRLEN", names, deadline)):
                is_stored[index] = length == sizes[index]
            missing = [index for index, is_here in enumerate(is_stored) if not is_here]
            for node, indexes in self._by_node(names, missing):
                connection = links.connection(node, deadline)
                for index in indexes:
                    _send_object(connection, form, names[index], items[index], deadline)
                for index in indexes:
                    is_stored[index] = self._noted(connection.receive(deadline)) == b"OK"
            written = [sizes[index] for index in missing if is_stored[index]]
            self._counter.add(num_written=len(written), written_bytes=sum(written))

        if started >= self._stores_from:
            self._try("store", store, deadline)
        self._counter.add(num_dropped=is_stored.count(False), write_s=time.monotonic() - started)
        return is_stored

    def clear(self) -> None:
        deadline = time.monotonic() + CLEAR_S

        def clear(form: SealedFormat, links: Links) -> None:
            for node in self._nodes.nodes():
                self._clear_node(links, node, form, deadline)

        self._try("clear", clear, deadline)

    def state(self) -> SourceState:
        self._counter.set(is_broken=self._reads.is_broken)
        return self._counter.state

    def close(self) -> None:
        self._form = None
        with self._lock:
            for links in self._idle:
                links.close()
            self._idle.clear()
        self._nodes.close()

    def _try(self, kind: str, action: Action, deadline: float) -> bool:
        """Run an action with connections of its own; return whether it succeeded. A failure is counted. The action does
        not run without a namespace, after the deadline, while the breaker of the reads is open, or if the breaker of
        its kind does not admit it."""
        form = self._form
        breaker = self._writes if kind in ("store", "clear") else self._reads
        if form is None or time.monotonic() >= deadline or self._reads.is_open or not breaker.admit():
            return False
        with self._lock:
            links = self._idle.pop() if self._idle else Links(self._nodes)
        try:
            self._nodes.learn(deadline)
            action(form, links)
        except OSError as error:
            links.close()  # replies may be outstanding
            self._nodes.doubt()
            self._count_failure(str(error) or type(error).__name__, breaker.failed(kind))
            return False
        except BaseException:
            links.close()
            breaker.cancelled()
            raise
        with self._lock:
            self._idle.append(links)
        self._count_success(breaker.succeeded(kind))
        return True

    def _count_failure(self, error: str, is_last: bool) -> None:
        self._counter.add(num_failed=1)
        self._counter.set(error=error)
        if is_last:
            text = "%s is not used for now, and requests go on: %s: start it, or give another --kv-remote"
            logger.warning(text, self._nodes.place, error)
            self._on_change()

    def _count_success(self, has_recovered: bool) -> None:
        if has_recovered:
            logger.info("%s answers again", self._nodes.place)
        if has_recovered or not self._counter.state.is_open:
            self._counter.set(is_open=True, error="")
            self._on_change()

    def _by_node(self, names: Sequence[bytes], indexes: Iterable[int]) -> list[tuple[Node, list[int]]]:
        """Return the indexes grouped by the node that holds each one's name, in their order."""
        groups: dict[Node, list[int]] = defaultdict(list)
        for index in indexes:
            groups[self._nodes.node_of(names[index])].append(index)
        return list(groups.items())

    def _ask(self, links: Links, verb: bytes, names: Sequence[bytes], deadline: float) -> list[Reply]:
        """Send one command for each name, all at once, and return the replies in the order of the names."""
        groups = self._by_node(names, range(len(names)))
        connections = [links.connection(node, deadline) for node, _ in groups]
        for connection, (_, indexes) in zip(connections, groups, strict=True):
            connection.send([b"".join(command(verb, names[index]) for index in indexes)], deadline)
        replies: list[Reply] = [None] * len(names)
        for connection, (_, indexes) in zip(connections, groups, strict=True):
            for index in indexes:
                replies[index] = self._noted(connection.receive(deadline))
        return replies

    def _receive(
        self,
        connection: Connection,
        form: SealedFormat,
        items: Sequence[Item],
        indexes: Sequence[int],
        deadline: float,
        report: Callable[[int, bool], None],
    ) -> list[bytes]:
        """Receive items of one node into their slots and report them; return the names of damaged values."""
        head, tail = memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(form.tail_bytes))
        sizes = [form.num_bytes(len(items[index].slot)) for index in indexes]
        num_asked, bad_names = 0, []
        for number, index in enumerate(indexes):
            num_waiting = num_asked - number
            if num_waiting < 2 or 2 * sum(sizes[number:num_asked]) <= AHEAD_BYTES:
                num_ahead = max(2, num_within(sizes[number:], AHEAD_BYTES))
                batch = indexes[num_asked : number + num_ahead]
                names = [_name(form, items[each].key) for each in batch]
                if names:
                    connection.send([b"".join(command(b"GET", name) for name in names)], deadline)
                num_asked += len(batch)
            key, slot = items[index].key, items[index].slot
            outcome = connection.receive_value([head, slot, tail], deadline)
            defect = self._defect(outcome)
            if outcome is True:
                defect = form.find_defect(key, head, slot, tail)
            if defect is not None:
                self._counter.reject(defect)
                bad_names.append(_name(form, key))
            is_good = outcome is True and defect is None
            if is_good:
                self._counter.add(num_read=1, read_bytes=sizes[number])
            report(index, is_good)
        return bad_names

    def _defect(self, outcome: bool | ServerError | None) -> str | None:
        """Return why a value that was not received must be deleted; None if it was received, is missing, or the server
        has refused the command."""
        if isinstance(outcome, ServerError):
            if outcome.code == "WRONGTYPE":
                return "type"
            self._noted(outcome)
            self._counter.add(num_failed=1)
        return "length" if outcome is False else None

    def _clear_node(self, links: Links, node: Node, form: SealedFormat, deadline: float) -> None:
        connection, cursor, pattern = links.connection(node, deadline), b"0", _name(form, b"") + b"*"
        while True:
            connection.send([command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")], deadline)
            match connection.receive(deadline):
                case [bytes() as cursor, [*names]]:
                    self._ask(links, b"DEL", [name for name in names if isinstance(name, bytes)], deadline)
                case reply:
                    raise ConnectionError(f"SCAN was answered by {reply!r}")
            if cursor == b"0":
                return

    def _noted(self, reply: Reply) -> Reply:
        """Return the reply. Log the first error of each kind, and act on errors that concern more than one key."""
        if isinstance(reply, ServerError) and reply.code != "WRONGTYPE":
            self._counter.set(error=reply.text)
            if reply.code in _ELSEWHERE:
                self._nodes.is_known = False  # the next request reads the nodes again
            elif reply.code in _REFUSALS:
                self._stores_from = time.monotonic() + REFUSED_S
            if reply.code not in self._logged and reply.code not in _ELSEWHERE:
                self._logged.add(reply.code)
                logger.warning("%s refuses a command: %s", self._nodes.place, reply.text)
        return reply


def _name(form: SealedFormat, key: bytes) -> bytes:
    """Return the name of an object in the store."""
    return f"kv:{form.digest[:8].hex()}:{key.hex()}".encode()


def _send_object(connection: Connection, form: SealedFormat, name: bytes, item: Item, deadline: float) -> None:
    head, tail = form.seal(item.key, item.slot)
    size = form.num_bytes(len(item.slot))
    start = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size)
    connection.send([start + head, item.slot, tail + b"\r\n"], deadline)
