"""HttpListeners: errors of bind, sharing with frontends, warnings about open ports, files of --uds."""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom.frontend.listening.http_listeners import HttpListeners
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig

WARNING = "all who can reach it may use the engine"


@pytest.fixture
def listeners() -> Iterator[HttpListeners]:
    listeners = HttpListeners()
    yield listeners
    listeners.close()


def port_of(listeners: HttpListeners) -> int:
    return int(listeners.addresses[0].rpartition(":")[2])


def refuses(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def test_the_error_of_a_port_in_use_names_the_port_and_the_option_that_was_given(listeners: HttpListeners) -> None:
    listeners.open(EngineConfig(http="0"))
    other = HttpListeners()
    port = port_of(listeners)
    for config, option in (
        (EngineConfig(http=str(port)), "--http"),
        (EngineConfig(port=port), "--port"),
        (EngineConfig(host="127.0.0.1", port=port), "--port"),
    ):
        reason = rf"cannot listen on port {port} of 127\.0\.0\.1: Address already in use; choose another with {option}$"
        with pytest.raises(ConfigError, match=reason):
            other.open(config)
        other.close()
    for config, option in (
        (EngineConfig(http="nowhere.invalid:1"), "--http"),
        (EngineConfig(host="nowhere.invalid", port=1), "--host"),
    ):
        with pytest.raises(ConfigError, match=rf"port 1 of nowhere\.invalid: .*; choose another with {option}$"):
            other.open(config)
        other.close()


def test_connections_wait_without_a_frontend_and_are_refused_after_close(listeners: HttpListeners) -> None:
    listeners.open(EngineConfig(http="0"))
    port = port_of(listeners)
    with (
        socket.socket(fileno=os.dup(listeners.sockets[0].fileno())),
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.sendall(b"GET")
    with socket.create_connection(("127.0.0.1", port)):  # still listening after the copy was closed
        pass
    listeners.close()
    listeners.close()
    assert refuses(port)


@pytest.mark.parametrize(
    ("http", "api_keys", "shown", "warns"),
    [
        ("0", [], "http://127.0.0.1:", False),
        ("localhost:0", [], "http://127.0.0.1:", False),
        ("[::1]:0", [], "http://[::1]:", False),
        ("0.0.0.0:0", [], "http://0.0.0.0:", True),
        ("0.0.0.0:0", ["secret"], "http://0.0.0.0:", False),
        ("[::]:0", [], "http://[::]:", True),
    ],
)
def test_a_reachable_port_without_a_key_logs_a_warning(
    listeners: HttpListeners,
    caplog: pytest.LogCaptureFixture,
    http: str,
    api_keys: list[str] | None,
    shown: str,
    warns: bool,
) -> None:
    with caplog.at_level(logging.WARNING):
        listeners.open(EngineConfig(http=http, api_key=api_keys or None))
    assert listeners.addresses[0].startswith(shown) and not listeners.addresses[0].endswith(":0")
    assert (WARNING in caplog.text) == warns
    family = socket.AF_INET6 if "[" in http else socket.AF_INET
    with socket.socket(family) as client:
        client.connect(("::1" if "[" in http else "127.0.0.1", port_of(listeners)))


def test_listening_on_any_ipv6_address_accepts_ipv4_too(listeners: HttpListeners) -> None:
    listeners.open(EngineConfig(http="[::]:0"))
    with socket.create_connection(("127.0.0.1", port_of(listeners))):
        pass


def test_a_unix_socket_has_its_mode_and_close_removes_its_files(listeners: HttpListeners, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    for mode in ("600", "666"):
        listeners.open(EngineConfig(uds=str(path), uds_mode=mode))
        assert stat.S_IMODE(path.stat().st_mode) == int(mode, 8)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        listeners.close()
        listeners.addresses.clear()
        assert list(tmp_path.iterdir()) == []


def test_a_unix_socket_in_use_is_refused_and_a_stale_one_replaced(listeners: HttpListeners, tmp_path: Path) -> None:
    config = EngineConfig(uds=str(tmp_path / "http.sock"))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(config.uds))
    listeners.open(config)
    with pytest.raises(ConfigError, match="in use by another engine: stop it or choose another --uds address"):
        HttpListeners().open(config)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(config.uds))
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="there is a file: remove it or choose another --uds"):
        HttpListeners().open(EngineConfig(uds=str(tmp_path / "file")))
