"""Errors of TLS files are one line that names the option; a server with a certificate speaks TLS."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from tokenloom.frontend.cli.batches.http_call import HttpResponse, call
from tokenloom.frontend.forms.openai.errors import json_response
from tokenloom.frontend.listening.journal.journal import HttpJournal
from tokenloom.frontend.listening.journal.pages import JournalLimits, new_pages
from tokenloom.frontend.listening.keeper import Keeper
from tokenloom.frontend.listening.tls import new_ssl_context
from tokenloom.frontend.server.http.connections import Connections
from tokenloom.frontend.server.http.kept.connection import ConnectionKeeper
from tokenloom.frontend.server.http.server import accept, new_server
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig

T = TypeVar("T")

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make PEM files: cert.pem and key.pem belong together, other.pem is another key, locked.pem has a passphrase."""
    folder = tmp_path_factory.mktemp("tls")
    for command in (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem -out cert.pem "
        "-subj /CN=localhost -addext subjectAltName=DNS:localhost",
        "ecparam -genkey -name prime256v1 -noout -out other.pem",
        "ec -in key.pem -aes128 -passout pass:x -out locked.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True, timeout=30)
    (folder / "junk.pem").write_text("junk")
    (folder / "both.pem").write_text((folder / "cert.pem").read_text() + (folder / "key.pem").read_text())
    return folder


def context_of(folder: Path, **files: str | int) -> ssl.SSLContext | None:
    paths = {name: str(folder / value) if isinstance(value, str) else value for name, value in files.items()}
    return new_ssl_context(EngineConfig(http="0", **paths))  # type: ignore[arg-type]


def test_the_key_may_be_in_the_file_of_the_certificate_and_those_of_clients_may_be_required(folder: Path) -> None:
    assert context_of(folder) is None
    required = {"ssl_certfile": "both.pem", "ssl_ca_certs": "cert.pem", "ssl_cert_reqs": 2}
    for files, mode in (
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem"}, ssl.CERT_NONE),
        ({"ssl_certfile": "both.pem"}, ssl.CERT_NONE),
        (required, ssl.CERT_REQUIRED),
    ):
        context = context_of(folder, **files)  # type: ignore[arg-type]
        assert context is not None and context.verify_mode is mode


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"ssl_certfile": "none.pem"}, r"--ssl-certfile \S*none.pem cannot be read: No such file"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "none.pem"}, "--ssl-keyfile .*cannot be read"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "other.pem"}, "other.pem does not belong to this certificate"),
        ({"ssl_certfile": "cert.pem"}, "must hold a certificate and its private key in PEM form"),
        ({"ssl_certfile": "junk.pem"}, "must hold a certificate and its private key in PEM form"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "locked.pem"}, "has a passphrase"),
        ({"ssl_certfile": "both.pem", "ssl_ca_certs": "junk.pem"}, "--ssl-ca-certs .* holds no certificate"),
        ({"ssl_keyfile": "key.pem"}, "need --ssl-certfile"),
        ({"ssl_certfile": "both.pem", "ssl_cert_reqs": 2}, "needs --ssl-ca-certs"),
        ({"ssl_certfile": "both.pem", "ssl_cert_reqs": 3}, r"--ssl-cert-reqs must be in \[0, 2\]"),
    ],
)
def test_the_error_of_a_bad_tls_file_is_one_line(folder: Path, files: dict[str, str | int], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        context_of(folder, **files)
    assert "\n" not in str(caught.value)


async def ask(folder: Path, client: Callable[[int], Awaitable[T]]) -> T:
    """Run `client` with the port of a TLS server, and return its result."""
    config = EngineConfig(http="0", ssl_certfile=str(folder / "both.pem"), http_timeout_s=5.0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await json_response(scope["scheme"])(scope, receive, send)

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    connections = Connections(5.0, 10, lambda *refused: None)
    ours, theirs = socket.socketpair()
    limits = JournalLimits(num_slots=10, max_body_bytes=1 << 20, max_bytes=1 << 20)
    keeper = ConnectionKeeper(HttpJournal(new_pages(), limits, "v"), Keeper(ours), is_on=True)
    server = accept(listener, new_server(app), connections, config, lambda: None, keeper, is_local=True)
    try:
        return await client(listener.getsockname()[1])
    finally:
        for each in (server, listener, ours, theirs):
            each.close()


def run(folder: Path, client: Callable[[int], Awaitable[T]]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(ask(folder, client), 20.0))


@pytest.mark.parametrize("is_trusted", [True, False])
def test_the_batch_command_speaks_tls(folder: Path, monkeypatch: pytest.MonkeyPatch, is_trusted: bool) -> None:
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(folder / "cert.pem"))

    async def client(port: int) -> HttpResponse:
        return await asyncio.to_thread(call, "GET", f"https://localhost:{port}", "/v1/models", None, None)

    answer = run(folder, client)
    assert (answer.status, answer.body) == (200, b'"https"') if is_trusted else "CERTIFICATE_VERIFY" in answer.reason
