"""FakeHub: a server with the parts of the Hugging Face hub's HTTP API that fetching a model uses.

Follows https://huggingface.co/docs/hub/api: the list of a repository, its tree, and files with ranges, etags and
redirects left out. A test may let it break connections off, refuse, or answer without ranges; it records all requests.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HOLD_S = 60.0
LARGE_BYTES = 1 << 10  # a larger file has the SHA-256 of its content as its etag, as one in git's large file storage


class Asked(NamedTuple):
    """A request for a file."""

    file: str
    range: str | None
    authorization: str | None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a client that has closed its connection."""


class FakeHub:
    """Serves `files` of repositories; `url` is for HF_ENDPOINT."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}  # by repository, by name
        self.cards: dict[str, dict[str, Any]] = {}  # further fields of a repository's description
        self.private: set[str] = set()  # repositories that need TOKEN
        self.gated: set[str] = set()  # repositories whose files need a licence
        self.cuts: dict[str, list[int]] = {}  # by file: bytes after which its next answers are broken off
        self.holds: dict[str, int] = {}  # by file: bytes after which its answers wait for `released`
        self.released = threading.Event()
        self.has_ranges = True
        self.asked: list[Asked] = []
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def ranges(self, file: str) -> list[str | None]:
        """Return the ranges that were asked for of a file, in order; None for the whole file."""
        return [each.range for each in self.asked if each.file == file]

    def _handler(hub) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        return Handler

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = unquote(urlsplit(request.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, name, *rest = parts[2:] if is_api else parts
        repository, authorization = f"{owner}/{name}", request.headers.get("authorization")
        if repository not in self.files or (repository in self.private and authorization != "Bearer hf_key"):
            return _send(request, 401, {"error": "no such repository"}, {"X-Error-Code": "RepoNotFound"})
        files = self.files[repository]
        if is_api and rest[:1] in ([], ["revision"]):
            return self._describe(request, repository, rest[1:])
        if is_api and rest[0] == "tree":
            return _send(request, 200, [_tree_entry(file, content) for file, content in files.items()])
        if repository in self.gated:
            return _send(request, 403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        file = "/".join(rest[2:])
        if file not in files:
            return _send(request, 404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"})
        return self._send_file(request, file, files[file])

    def _describe(self, request: BaseHTTPRequestHandler, repository: str, revision: list[str]) -> None:
        if revision not in ([], ["main"], [COMMIT]):
            return _send(request, 404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
        siblings = [
            {"rfilename": file, "size": len(content), "blobId": _git_id(content), **_large(content, "sha256")}
            for file, content in self.files[repository].items()
        ]
        card = {"id": repository, "sha": COMMIT, "siblings": siblings, **self.cards.get(repository, {})}
        return _send(request, 200, card)

    def _send_file(self, request: BaseHTTPRequestHandler, file: str, content: bytes) -> None:
        wanted = request.headers.get("range")
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(content)}"', "Accept-Ranges": "bytes"}
        if request.command == "HEAD":
            _send(request, 200, content, headers)
            return
        self.asked.append(Asked(file, wanted, request.headers.get("authorization")))
        status = 200
        if wanted is not None and self.has_ranges:
            begin, status = int(wanted.removeprefix("bytes=").removesuffix("-")), 206
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
            content = content[begin:]
        cuts = self.cuts.get(file, [])
        if (held := self.holds.pop(file, None)) is not None:
            request.send_response(status)
            request.send_header("Content-Length", str(len(content)))
            request.end_headers()
            request.wfile.write(content[:held])
            self.released.wait(HOLD_S)
            request.close_connection = True
            return
        _send(request, status, content, headers, cut=cuts.pop(0) if cuts else None)


@contextmanager
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Start a hub to which this process's client of the hub is directed, as HF_ENDPOINT does at its start."""
    hub = FakeHub()
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    try:
        yield hub
    finally:
        hub.stop()


def _send(
    request: BaseHTTPRequestHandler,
    status: int,
    content: bytes | object,
    headers: dict[str, str] | None = None,
    cut: int | None = None,
) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    request.send_response(status)
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body if cut is None else body[:cut])
    if cut is not None:
        request.close_connection = True


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if len(content) > LARGE_BYTES else _git_id(content)


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _large(content: bytes, name: str) -> dict[str, Any]:
    if len(content) <= LARGE_BYTES:
        return {}
    return {"lfs": {name: hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 135}}


def _tree_entry(file: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": file, "size": len(content), "oid": _git_id(content), **_large(content, "oid")}
