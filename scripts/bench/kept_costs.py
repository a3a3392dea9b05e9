"""Costs of kept connections in CPU time of this process, without an engine: a piece, a connection, a stream's memory.

The frontend's and the supervisor's side both run here, on real sockets. Times are the best of several rounds, since
other work on the machine only adds to them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import zmq

from tokenloom.frontend.launcher.supervisor.frontends.kept_connections import KeptConnections
from tokenloom.frontend.listening.http_listeners import HttpListeners
from tokenloom.frontend.listening.journal.journal import HttpJournal
from tokenloom.frontend.listening.journal.pages import PAGE, JournalLimits, new_pages
from tokenloom.frontend.listening.journal.record import Reason, State
from tokenloom.frontend.listening.journal.slot import Slot
from tokenloom.frontend.listening.keeper import Keeper
from tokenloom.frontend.server.api.continuation import Shown
from tokenloom.frontend.server.http.kept.connection import ConnectionKeeper
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.scripts.bench.engine_steps import new_spec

LIMITS = JournalLimits(num_slots=256, max_body_bytes=1 << 20, max_bytes=256 << 20)
REQUEST, PIECE = b"x" * 1500, b"y" * 250
NUM_STREAMS, NUM_TOKENS, NUM_CONNECTIONS = 32, 500, 100


def kept_costs(rounds: int) -> dict[str, float]:
    """Return microseconds of a piece and of a connection, and KiB of a stream."""
    with contextlib.closing(_Streams()) as streams:
        stream_kib = streams.kib_of_first()
        piece_us = min(streams.piece_us() for _ in range(rounds))
    with contextlib.ExitStack() as stack:
        connections = _Connections(stack)
        connection_us = min(connections.connection_us() for _ in range(rounds))
    return {"piece_us": piece_us, "connection_us": connection_us, "stream_kib": stream_kib}


def _cpu_us(work: Callable[[], None], count: int) -> float:
    begun = time.thread_time()
    work()
    return (time.thread_time() - begun) / count * 1e6


class _Streams:
    """Streams in one journal."""

    def __init__(self) -> None:
        self._fd = new_pages()
        self._journal = HttpJournal(self._fd, LIMITS, "bench")
        self._shown = [Shown([(0, encode_ids((token_id,)))], [], token_id, 0, 1) for token_id in range(NUM_TOKENS)]

    def _open(self) -> Slot:
        slot = self._journal.open_slot()
        assert slot is not None
        slot.room(0)[: len(REQUEST)] = REQUEST
        slot.put_in(len(REQUEST), 0)
        return slot

    def _write(self, slots: list[Slot]) -> None:
        for shown in self._shown:
            for slot in slots:
                if not slot.put_next(PIECE, shown):
                    slot.put_out(PIECE, 0, shown)

    def piece_us(self) -> float:
        """Return the time of a piece with one token."""
        slots = [self._open() for _ in range(NUM_STREAMS)]
        found = _cpu_us(lambda: self._write(slots), NUM_STREAMS * NUM_TOKENS)
        for slot in slots:
            slot.put_out(b"", 0, end=State.IDLE)
            self._journal.free_slot(slot)
        return found

    def kib_of_first(self) -> float:
        """Return the memory of a stream amid its answer. No slot has pages yet."""
        self._write([self._open()])
        return (self._journal.pages.num_used_bytes + PAGE) / 1024

    def close(self) -> None:
        self._journal.pages.close()
        os.close(self._fd)


class _Connections:
    """A frontend's and the supervisor's side of kept connections, and sockets to keep."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        config = EngineConfig(http="127.0.0.1:0")
        listeners = HttpListeners()
        listeners.open(config)
        stack.callback(listeners.close)
        self._kept = KeptConnections(new_spec(config), listeners, zmq.Poller())
        stack.callback(self._kept.close)
        journal_fd, channel_fd = self._kept.prepare(0)
        self._kept.hand_over(0)
        channel = stack.enter_context(socket.socket(fileno=os.dup(channel_fd)))
        self._address = listeners.sockets[0].getsockname()
        self._keeper = ConnectionKeeper(HttpJournal(journal_fd, LIMITS, "bench"), keeper := Keeper(channel), is_on=True)
        with ThreadPoolExecutor(1) as pool:  # the supervisor's part, once
            left = pool.submit(lambda: list(keeper.take_kept()))
            while not left.done():
                self._kept.go_on()

    def _open_and_close(self, clients: list[socket.socket]) -> None:
        for _ in clients:
            self._kept.go_on()
            connection, number = self._keeper.accept()
            self._keeper.open(connection, number, Reason.NONE).close()
            connection.close()
            self._kept.go_on()

    def connection_us(self) -> float:
        """Return the time to accept and keep a connection and to let it go, in both processes together."""
        clients = [socket.create_connection(self._address) for _ in range(NUM_CONNECTIONS)]
        found = _cpu_us(lambda: self._open_and_close(clients), NUM_CONNECTIONS)
        for each in clients:
            each.close()
        return found
