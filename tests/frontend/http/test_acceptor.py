"""HTTP connections leave some descriptors to the rest of the engine, and a few of them find room all the same."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from tokenloom.frontend.http.acceptor import LEAST_RESERVE, NUM_PROBES, Acceptor

DEADLINE_S = 20.0
LIMIT = 160


@contextlib.contextmanager
def descriptors_up_to(highest: int) -> Iterator[None]:
    """Take all descriptors below `highest`, of LIMIT that may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, hard))
    taken: list[int] = []
    try:
        while not taken or taken[-1] < highest - 1:
            taken.append(os.dup(0))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("highest", "num_open", "is_accepted"),
    [
        (LIMIT * 3 // 4 - 10, 1000, True),
        (LIMIT * 3 // 4, NUM_PROBES, False),
        (LIMIT * 3 // 4, NUM_PROBES - 2, True),
        (LIMIT - LEAST_RESERVE - 3, 0, True),
        (LIMIT - LEAST_RESERVE, 0, False),
    ],
)
def test_probes_find_room_where_others_wait(highest: int, num_open: int, is_accepted: bool) -> None:
    async def work() -> None:
        done = asyncio.Event()
        found: list[bool] = []

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                found.append(True)
                done.set()
                transport.close()

        def on_exhausted() -> None:
            found.append(False)
            done.set()

        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
            listener.setblocking(False)
            client.setblocking(False)
            with descriptors_up_to(highest):
                acceptor = Acceptor(listener, Accepted, on_exhausted, lambda: num_open)
                await asyncio.get_running_loop().sock_connect(client, listener.getsockname())
                async with asyncio.timeout(DEADLINE_S):
                    await done.wait()
                acceptor.close()
                await acceptor.wait_closed()
            assert found[0] is is_accepted

    asyncio.run(work())
