"""An engine uses as many descriptors as allowed; without free ones, HTTP connections wait instead of being reset."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from urllib.parse import urlsplit

import httpx2
import pytest

from tokenloom.ipc.process.descriptors import MAX_DESCRIPTORS
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.equipped_engine import NUM_DESCRIPTORS, EquippedEngine
from tokenloom.tests.system.http_engine import DEADLINE_S, samples

NUM_FREE = 10  # free descriptors of the frontend
NUM_IDLE = 40
EVENT = "tokenloom_frontend_events_total{accept_paused_for_descriptors}"
COMPLAINT = "no HTTP connection can be accepted"


def test_every_process_raises_its_descriptor_limit_to_the_hard_limit(equipped: EquippedEngine) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    assert {process.rlimit(resource.RLIMIT_NOFILE)[0] for process in equipped.processes()} == {wanted}
    assert wanted > NUM_DESCRIPTORS


def test_without_descriptors_new_connections_wait_until_others_end(
    equipped: EquippedEngine, door: httpx2.Client
) -> None:
    assert door.get("/health").status_code == 200
    frontend, place = equipped.child("frontend"), urlsplit(equipped.url)
    address = (place.hostname, place.port)
    said, num_paused = equipped.errors.read_text().count(COMPLAINT), samples(door).get(EVENT, 0)
    before = resource.prlimit(frontend.pid, resource.RLIMIT_NOFILE)
    # below the limit on connections, which was computed at the start and would close idle ones
    limit = frontend.num_fds() + NUM_FREE
    with contextlib.ExitStack() as idle:
        resource.prlimit(frontend.pid, resource.RLIMIT_NOFILE, (limit, before[1]))
        idle.callback(resource.prlimit, frontend.pid, resource.RLIMIT_NOFILE, before)
        for _ in range(NUM_IDLE):
            idle.enter_context(socket.create_connection(address, DEADLINE_S))
        wait_until(lambda: samples(door).get(EVENT, 0) > num_paused)
        cpu_s, begun = sum(frontend.cpu_times()[:2]), time.monotonic()
        with socket.create_connection(address, 1.0) as late:
            late.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            with pytest.raises(TimeoutError):  # it is neither answered nor reset
                late.recv(1)
            assert sum(frontend.cpu_times()[:2]) - cpu_s < 0.3 * (time.monotonic() - begun), "it spins"
            idle.close()
            late.settimeout(DEADLINE_S)
            assert late.recv(100).startswith(b"HTTP/1.1 200")
    errors = equipped.errors.read_text()
    assert f"{COMPLAINT} (Too many open files; {limit} descriptors may be open)" in errors
    assert errors.count(COMPLAINT) - said <= 8, "a line for each doubling"
