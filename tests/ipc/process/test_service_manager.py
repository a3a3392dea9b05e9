"""notify sends states to systemd, and ignores a missing or closed socket."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tokenloom.ipc.process.service_manager import READY, notify

TIMEOUT_S = 5.0


@pytest.mark.parametrize("address", ["{folder}/notify", "@tokenloom-test-{folder}"])
def test_a_state_is_sent_to_the_notify_socket(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = address.format(folder=tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name.replace("@", "\0"))
        receiver.settimeout(TIMEOUT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        notify(READY, "serves demo")
        assert receiver.recv(1000) == b"READY=1\nSTATUS=serves demo"


def test_a_missing_or_closed_notify_socket_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify(READY, "")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    notify(READY, "")
