"""Kill a small HTTP server at each fault point from a connection's arrival to its last byte: no byte is wrong.

    python scripts/chaos/http_points.py --kills 200 --clients 8

The server is that of tests/frontend/server/http/kept/: its supervisor keeps the connections, and forks the next server
at once. Each of --clients clients asks for one stream after the other, every second client on a new connection each
time; before each kill the fault is placed, and the next process that reaches the point is killed there. Counts the
streams, the wrong and the cut ones, and those refused with 503. Exit code 1 if there is any of these.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from tokenloom.scripts.bench.report import print_json
from tokenloom.scripts.bench.runner import read_options
from tokenloom.tests.frontend.server.http.kept.test_losses import DEADLINE_S, POINTS, Supervised, is_whole
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.waiting import wait_until

NUM_TOKENS = 60
COUNTS = ("streams", "wrong", "cut", "refused")


def ask(server: Supervised, is_over: Event, stays: bool) -> dict[str, int]:
    """Ask for streams until it is over, and count their outcomes. `stays`: on one connection."""
    counts, client = dict.fromkeys(COUNTS, 0), server.connect()
    while not is_over.is_set():
        counts["streams"] += 1
        if not stays:
            client.socket.close()
            server.clients.remove(client)
            client = server.connect()
        try:
            found = client.ask(b"/stream?%d" % NUM_TOKENS)
        except OSError:
            counts["cut"] += 1
            client = server.connect()
            continue
        if found == b"503":  # the connection closes after it
            counts["refused"] += 1
            client = server.connect()
        elif not is_whole(found, NUM_TOKENS):
            counts["wrong"] += 1
    return counts


def kill_at(point: str, server: Supervised) -> None:
    """Place a fault, and wait for the server after the one that it kills."""
    with server.connect() as probe:
        probe.ask(b"/length")  # it has adopted
    number = len(server.pids)
    inject(server.faults, point, "kill")
    if point == "http.adopt":
        os.kill(server.pids[-1], signal.SIGKILL)
        server.wait_for_server(number + 1)
    wait_until(lambda: not (server.faults / point).exists(), DEADLINE_S)
    server.wait_for_server(number + (2 if point == "http.adopt" else 1))


def measure(point: str, num_kills: int, num_clients: int) -> dict[str, int]:
    """Kill at a point while clients ask. Return the counts of all clients."""
    is_over = Event()
    with tempfile.TemporaryDirectory() as faults, ThreadPoolExecutor(num_clients) as pool:
        server = Supervised(Path(faults))
        try:
            asked = [pool.submit(ask, server, is_over, number % 2 == 0) for number in range(num_clients)]
            for _ in range(num_kills):
                kill_at(point, server)
            is_over.set()
            found = [each.result(DEADLINE_S) for each in asked]
        finally:
            is_over.set()
            num_servers = len(server.pids)
            server.close()
    return {"kills": num_servers - 1} | {name: sum(each[name] for each in found) for name in COUNTS}


OPTIONS = {"--kills": (200,), "--clients": (8,), "--point": ("all",)}


def main(argv: list[str] | None = None) -> int:
    arguments = read_options(__doc__, OPTIONS, argv)
    points = POINTS if arguments.point == "all" else (arguments.point,)
    report = {point: measure(point, arguments.kills, arguments.clients) for point in points}
    print_json(report, arguments.json)
    return 1 if any(each["wrong"] + each["cut"] + each["refused"] for each in report.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
