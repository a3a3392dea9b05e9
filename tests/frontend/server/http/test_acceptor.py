"""HTTP connections leave some descriptors to the rest of the engine, and a few of them find room all the same."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Callable, Iterator

import pytest

from tokenloom.frontend.server.http.acceptor import LEAST_RESERVE, MAX_RESERVE, NUM_PROBES, Acceptor

DEADLINE_S = 20.0


def limit_now() -> int:
    """Return a limit of descriptors of which this process has less than half."""
    return 160 + 2 * max(int(name) for name in os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def descriptors_up_to(highest: int, limit: int) -> Iterator[None]:
    """Take all descriptors below `highest`, of `limit` that may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    taken: list[int] = []
    try:
        while not taken or taken[-1] < highest - 1:
            taken.append(os.dup(0))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def reserve(limit: int) -> int:
    """Return how many descriptors HTTP leaves to the rest of the engine."""
    return min(MAX_RESERVE, limit // 4)


@pytest.mark.parametrize(
    ("num_left", "num_open", "is_accepted"),
    [
        (lambda limit: reserve(limit) + 10, 1000, True),
        (reserve, NUM_PROBES, False),
        (reserve, NUM_PROBES - 2, True),
        (lambda limit: LEAST_RESERVE + 3, 0, True),
        (lambda limit: LEAST_RESERVE, 0, False),
    ],
)
def test_probes_find_room_where_others_wait(num_left: Callable[[int], int], num_open: int, is_accepted: bool) -> None:
    limit = limit_now()

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
            with descriptors_up_to(limit - num_left(limit), limit):
                acceptor = Acceptor(listener, lambda *accepted: Accepted(), on_exhausted, lambda: num_open)
                await asyncio.get_running_loop().sock_connect(client, listener.getsockname())
                async with asyncio.timeout(DEADLINE_S):
                    await done.wait()
                acceptor.close()
                await acceptor.wait_closed()
            assert found[0] is is_accepted

    asyncio.run(work())
