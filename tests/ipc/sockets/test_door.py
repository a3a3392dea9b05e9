"""Connections to a unix socket that take all descriptors end no process: the socket admits nobody meanwhile."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tokenloom.ipc.sockets.addresses import closed_name, unlink_ipc_address
from tokenloom.ipc.sockets.zmq_sockets import bind, new_socket

DEADLINE_MS = 20_000
LIMIT = 600  # descriptors of the server
ECHO = """
import sys, zmq
from tokenloom.ipc.sockets.zmq_sockets import bind, new_socket
context = zmq.Context()
listener = new_socket(context, zmq.ROUTER)
door = bind(listener, sys.argv[1])
print("ready", flush=True)
while (frames := listener.recv_multipart())[1] != b"end":
    listener.send_multipart(frames)
door.close()
context.destroy(linger=0)
"""


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def limit_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))


def ask(context: zmq.Context[zmq.Socket[bytes]], address: str, text: bytes) -> bytes:
    with new_socket(context, zmq.DEALER) as asker:
        asker.connect(address)
        asker.send(text)
        assert asker.poll(DEADLINE_MS), "no answer"
        return asker.recv()


def test_connections_beyond_the_limit_end_no_process_and_others_come_in_once_they_close(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    path = tmp_path / "door.sock"
    command = [sys.executable, "-P", "-c", ECHO, f"ipc://{path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=limit_descriptors) as server:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        with new_socket(context, zmq.DEALER) as early, contextlib.ExitStack() as idle:
            early.connect(f"ipc://{path}")
            early.send(b"1")
            assert early.poll(DEADLINE_MS) and early.recv() == b"1"
            with contextlib.suppress(FileNotFoundError):
                for _ in range(2 * LIMIT):
                    idle.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
                pytest.fail("as many connections are admitted as come")
            early.send(b"2")
            assert early.poll(DEADLINE_MS) and early.recv() == b"2", "a client that is in stays in"
            assert closed_name(path).is_socket()
        assert ask(context, f"ipc://{path}", b"3") == b"3"
        assert not closed_name(path).exists()
        with new_socket(context, zmq.DEALER) as last:
            last.connect(f"ipc://{path}")
            last.send(b"end")
            assert server.wait(DEADLINE_MS / 1000) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_door_takes_the_place_of_a_dead_one_and_never_of_a_file(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    path = tmp_path / "door.sock"
    for name in (path, closed_name(path)):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(name))
    with new_socket(context, zmq.ROUTER) as listener:
        door = bind(listener, f"ipc://{path}")
        assert door is not None and not closed_name(path).exists()
        door.close()
        assert list(tmp_path.iterdir()) == []
    path.write_text("precious")
    with new_socket(context, zmq.ROUTER) as listener, pytest.raises(OSError):
        bind(listener, f"ipc://{path}")
    assert path.read_text() == "precious"


def test_an_old_door_removes_no_successor(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    address = f"ipc://{tmp_path / 'door.sock'}"
    with new_socket(context, zmq.ROUTER) as old, new_socket(context, zmq.ROUTER) as new:
        first, second = bind(old, address), bind(new, address)
        assert first is not None and second is not None
        first.close()
        assert (tmp_path / "door.sock").is_socket()
        second.close()


def test_a_closed_door_is_removed_with_its_address(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(closed_name(tmp_path / "door.sock")))
    unlink_ipc_address(f"ipc://{tmp_path / 'door.sock'}")
    assert list(tmp_path.iterdir()) == []
