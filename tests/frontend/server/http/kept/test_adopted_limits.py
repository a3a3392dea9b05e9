"""An adopted connection has the limits of one that this server has accepted itself."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tokenloom.frontend.listening.journal.journal import HttpJournal
from tokenloom.frontend.listening.journal.pages import JournalLimits, new_pages
from tokenloom.frontend.listening.journal.record import State
from tokenloom.frontend.listening.keeper import Keeper
from tokenloom.frontend.server.http.connections import Connections, HttpConnection
from tokenloom.frontend.server.http.kept.adoption import adopt
from tokenloom.frontend.server.http.kept.connection import ConnectionKeeper, Kept
from tokenloom.frontend.server.http.server import IDLE_S, new_server
from tokenloom.tests.frontend.server.http.kept.supervised import app
from tokenloom.tests.frontend.server.http.rig import DEADLINE_S, GET, ClockLoop

LIMITS = JournalLimits(num_slots=5, max_body_bytes=1 << 16, max_bytes=1 << 20)
TIMEOUT_S = 20.0


@pytest.mark.parametrize(("was_answered", "limit_s"), [(True, IDLE_S), (False, TIMEOUT_S)])
def test_an_adopted_connection_waits_for_its_next_request_as_long_as_any(was_answered: bool, limit_s: float) -> None:
    with asyncio.Runner(loop_factory=ClockLoop) as runner:
        runner.run(asyncio.wait_for(_adopt_and_wait(was_answered, limit_s), 2 * IDLE_S + DEADLINE_S))


async def _adopt_and_wait(was_answered: bool, limit_s: float) -> None:
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    connection, _ = listener.accept()
    listener.close()
    journal = HttpJournal(new_pages(), LIMITS, "v")
    slot = journal.open_slot(connection=7)
    assert slot is not None
    if was_answered:  # by a frontend that is lost
        writer.write(GET % b"/length")
        slot.put_in(connection.recv_into(slot.room(0)), 0)
        slot.put_out(b"answer", 0, end=State.IDLE)
        connection.sendall(b"answer")
        assert await reader.readexactly(6) == b"answer"
    channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.setblocking(False)
    keeper = ConnectionKeeper(journal, Keeper(channel), is_on=True)
    server, connections = new_server(app), Connections(TIMEOUT_S, 5, lambda *refused: None)

    def new_connection(kept: Kept, connection: socket.socket) -> HttpConnection:
        return HttpConnection(server.config, server.server_state, connections, True, kept)

    await adopt(keeper, [(7, connection)], new_connection)
    begun = loop.time()
    assert await reader.read() == b""  # until it is closed
    assert limit_s <= loop.time() - begun < 1.5 * limit_s
    writer.close()
    channel.close()
    other.close()
