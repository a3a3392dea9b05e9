"""An engine uses as many descriptors as allowed; without free ones, HTTP connections wait instead of being reset."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from pathlib import Path

import httpx2
import pytest

from tokenloom.ipc.process.descriptors import MAX_DESCRIPTORS
from tokenloom.tests.system.http_engine import DEADLINE_S, samples
from tokenloom.tests.system.launched import LaunchedEngine

NUM_FREE = 10  # free descriptors of the frontend
NUM_IDLE = 40
EVENT = "tokenloom_frontend_events_total{accept_paused_for_descriptors}"


def test_every_process_raises_its_descriptor_limit_to_the_hard_limit(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    with LaunchedEngine(tmp_path, prefix=["sh", "-c", 'ulimit -S -n 256 && exec "$@"', "sh"]) as engine:
        engine.wait_ready()
        assert {process.rlimit(resource.RLIMIT_NOFILE)[0] for process in engine.processes()} == {wanted}
        assert engine.stop() == 0


def test_without_descriptors_new_connections_wait_until_others_end(tmp_path: Path) -> None:
    with LaunchedEngine(tmp_path, "--http", "0") as engine, contextlib.ExitStack() as idle:
        url, deadline = engine.wait_http(), time.monotonic() + DEADLINE_S
        host, port = url.removeprefix("http://").split(":")
        frontend = engine.child("frontend")
        with httpx2.Client(base_url=url, timeout=DEADLINE_S) as http:
            assert http.get("/health").status_code == 200
            # below the limit on connections, which was computed at the start and would close idle ones
            limit = frontend.num_fds() + NUM_FREE
            resource.prlimit(frontend.pid, resource.RLIMIT_NOFILE, (limit, limit))
            for _ in range(NUM_IDLE):
                idle.enter_context(socket.create_connection((host, int(port)), DEADLINE_S))
            while not samples(http).get(EVENT):
                assert time.monotonic() < deadline
            before, begun = sum(frontend.cpu_times()[:2]), time.monotonic()
            with socket.create_connection((host, int(port)), 2.0) as late:
                late.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                with pytest.raises(TimeoutError):  # it is neither answered nor reset
                    late.recv(1)
                assert sum(frontend.cpu_times()[:2]) - before < 0.3 * (time.monotonic() - begun), "it spins"
                idle.close()
                late.settimeout(DEADLINE_S)
                assert late.recv(100).startswith(b"HTTP/1.1 200")
        errors = engine.errors.read_text()
        assert f"no HTTP connection can be accepted (Too many open files; {limit} descriptors may be open)" in errors
        assert errors.count("no HTTP connection can be accepted") <= 8, "a line for each doubling"
        assert engine.stop() == 0
